"""Watch: waits for input and for the ends of processes, and sends due signals."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import IO

from gradring.launch.processes import REAP_S, RankProcesses

#: Longest waits: while processes run, and while only their children are left.
TICK_S, CLOSING_TICK_S = 0.5, 0.02


class Watch:
    """The single thread's wait for all events of a job's processes.

    Attributes:
        processes: The processes to watch.
        terminate_at: Time of SIGTERM, on the monotonic clock.
        kill_at: Time of SIGKILL.
    """

    def __init__(self, processes: RankProcesses) -> None:
        """Starts without inputs and deadlines."""
        self.processes = processes
        self.terminate_at = self.kill_at = float("inf")
        self._give_up_at = float("inf")
        self._inputs = selectors.DefaultSelector()

    @property
    def is_ending(self) -> bool:
        """True if the processes have a deadline."""
        return self.kill_at < float("inf")

    @property
    def has_given_up(self) -> bool:
        """True if killed processes have not disappeared within `REAP_S`."""
        return time.monotonic() >= self._give_up_at

    def listen(self, source: int | socket.socket | IO[bytes], react: Callable[[], None]) -> None:
        """Calls ``react`` whenever the source can be read."""
        self._inputs.register(source, selectors.EVENT_READ, react)

    def ignore(self, source: int | IO[bytes]) -> None:
        """Stops reading a source."""
        self._inputs.unregister(source)

    def end(self, terminate_s: float, kill_s: float) -> None:
        """Sets the times of SIGTERM and SIGKILL, in seconds from now."""
        now = time.monotonic()
        self.terminate_at, self.kill_at = now + terminate_s, now + kill_s

    def postpone(self, seconds: float) -> None:
        """Moves both times by `seconds`."""
        self.terminate_at += seconds
        self.kill_at += seconds

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for input until a signal is due, at most for a tick, and handles the input."""
        if timeout_s is None:
            timeout_s = TICK_S if self.processes.running() else CLOSING_TICK_S
        due_s = min(self.terminate_at, self.kill_at) - time.monotonic()
        for key, _ in self._inputs.select(max(0.0, min(timeout_s, due_s))):
            key.data()

    def send_what_is_due(self) -> bool:
        """Sends a due SIGTERM once, or SIGKILL repeatedly; returns True if it sent one."""
        now = time.monotonic()
        if now >= self.kill_at:
            self.kill_at = now + CLOSING_TICK_S
            self._give_up_at = min(self._give_up_at, now + REAP_S)
            self.processes.signal(signal.SIGKILL)
            return True
        if now >= self.terminate_at:
            self.terminate_at = float("inf")
            self.processes.signal(signal.SIGTERM)
            return True
        return False

    def close(self) -> None:
        """Closes the selector."""
        self._inputs.close()
