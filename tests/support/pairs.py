"""Groups whose ranks are in one process, for what needs no second one, and the same in several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import gradring
from gradring import _native
from gradring.errors import GradringError
from gradring.machine.ports import free_ports
from support.waiting import DEADLINE_S, wait_until

Result = TypeVar("Result")

#: How long ranks may take that are threads; less than a test may.
THREADS_S = 240.0


def on_threads(
    world_size: int, fn: Callable[[gradring.Communicator], Result], **settings: Any
) -> list[Result]:
    """What ``fn`` returns on each rank; threads cost less than the processes of ``run_ranks``."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings = {"timeout": DEADLINE_S, "stall_timeout": DEADLINE_S, **settings}
    results: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            with gradring.Communicator(rank, world_size, address, **settings) as comm:
                results[rank] = fn(comm)
        except BaseException as error:
            failures[rank] = error

    # Nobody could end a thread that hangs; this process may end all the same.
    ranks = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(world_size)]
    for thread in ranks:
        thread.start()
    until = time.monotonic() + THREADS_S
    for thread in ranks:
        thread.join(max(0.0, until - time.monotonic()))
    # An error of gradring may follow from the failure of another rank.
    for error in sorted(failures.values(), key=lambda error: isinstance(error, GradringError)):
        raise error
    hanging = [rank for rank, thread in enumerate(ranks) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang"
    return [results[rank] for rank in range(world_size)]


def with_communicator(fn: Callable[..., Result], *args: Any) -> Result:
    """What ``fn`` returns on a process of ``run_ranks``, which has its settings by variables."""
    with gradring.init() as comm:
        return fn(comm, *args)


class Pair:
    """Rank 0 belongs to this thread; rank 1 does nothing by itself."""

    def __init__(self, **settings: Any) -> None:
        """Forms the group, and closes it at the end of a ``with`` statement."""
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        made = []

        def join() -> None:
            made.append(gradring.Communicator(1, 2, self.address, **settings))

        joining = threading.Thread(target=join)
        joining.start()
        self.comm = gradring.Communicator(0, 2, self.address, **settings)
        joining.join()
        self.peer: gradring.Communicator = made[0]

    def wait_until_rank_0_waits(self) -> None:
        """Returns when rank 0 has been inside a collective for a while."""
        wait_until(
            lambda: bool(_native.inquire(self.address, b"", None, 5.0).get("awaited")),
            "rank 0 waits for rank 1",
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.comm.close()
        self.peer.close()
