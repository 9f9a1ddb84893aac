"""Watch: waits for input and for processes to end, and sends signals when they are due."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import IO

from gradring.launch.processes import REAP_S, RankProcesses

#: How long to wait at most: while processes run, and while only what they have started is left.
TICK_S, CLOSING_TICK_S = 0.5, 0.02


class Watch:
    """One thread's wait for everything that can happen to the processes of a job.

    Attributes:
        processes: Those that are watched.
        terminate_at: When they get SIGTERM, on the monotonic clock.
        kill_at: When they get SIGKILL.
    """

    def __init__(self, processes: RankProcesses) -> None:
        """Nothing is due, and no input is read yet."""
        self.processes = processes
        self.terminate_at = self.kill_at = float("inf")
        self._give_up_at = float("inf")
        self._inputs = selectors.DefaultSelector()

    @property
    def is_ending(self) -> bool:
        """Whether the processes have a time by which they must have ended."""
        return self.kill_at < float("inf")

    @property
    def has_given_up(self) -> bool:
        """Whether killed processes have not disappeared for so long that nobody waits for them."""
        return time.monotonic() >= self._give_up_at

    def listen(self, source: int | socket.socket | IO[bytes], react: Callable[[], None]) -> None:
        """Calls ``react`` whenever the source can be read."""
        self._inputs.register(source, selectors.EVENT_READ, react)

    def ignore(self, source: int | IO[bytes]) -> None:
        """Reads a source no more."""
        self._inputs.unregister(source)

    def end(self, terminate_s: float, kill_s: float) -> None:
        """Gives the processes these times from now."""
        now = time.monotonic()
        self.terminate_at, self.kill_at = now + terminate_s, now + kill_s

    def postpone(self, seconds: float) -> None:
        """Gives the processes so much longer."""
        self.terminate_at += seconds
        self.kill_at += seconds

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for input until a signal is due, for a tick at most, and reads what is there."""
        if timeout_s is None:
            timeout_s = TICK_S if self.processes.running() else CLOSING_TICK_S
        due_s = min(self.terminate_at, self.kill_at) - time.monotonic()
        for key, _ in self._inputs.select(max(0.0, min(timeout_s, due_s))):
            key.data()

    def send_what_is_due(self) -> bool:
        """Sends SIGTERM once, or SIGKILL until no process is left; whether it has."""
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
        """Ends the reading."""
        self._inputs.close()
