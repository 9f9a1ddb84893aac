"""A group of two ranks in one process: for what one process does, without a second one."""

from __future__ import annotations

import threading
from typing import Any

import gradring
from gradring import _native
from gradring.ports import free_ports
from waiting import wait_until


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
