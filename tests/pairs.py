"""Groups whose ranks are in one process: for what needs no second one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import gradring
from gradring import _native
from gradring.ports import free_ports
from waiting import DEADLINE_S, wait_until

Result = TypeVar("Result")


def on_threads(
    world_size: int, fn: Callable[[gradring.Communicator], Result], **settings: Any
) -> list[Result]:
    """What ``fn`` returns on each rank; threads cost less than the processes of ``run_ranks``."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    # Nobody could end a thread that waits for longer.
    settings = {"stall_timeout": DEADLINE_S, **settings}

    def run(rank: int) -> Result:
        with gradring.Communicator(rank, world_size, address, **settings) as comm:
            return fn(comm)

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(run, range(world_size)))


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
