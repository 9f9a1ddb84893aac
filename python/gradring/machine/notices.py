"""Signals by which a scheduler says that it will end a process, for trainings that act on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradring import _native


class Notices:
    """Signals that are noted, so that the training can react where all ranks meet.

    Python calls a handler in the main thread between two of its instructions, so handlers do no
    more than note.
    """

    def __init__(self, will_ask: Callable[[], bool]) -> None:
        """Watches no signal yet.

        Args:
            will_ask: Whether the training will look at `received`. Otherwise SIGTERM ends the
                process, as ever.
        """
        self._process = os.getpid()
        self._will_ask = will_ask
        self._before: dict[int, Any] = {}
        #: The number of the last signal that has come, or 0.
        self.received = 0

    def watch(self, *signals: int) -> None:
        """Notes these signals from now on; in the main thread only.

        Raises:
            OSError: The system lets no process handle one of them.
            ValueError: One of them is no signal, or this is another thread.
        """
        for signum in signals:
            if signum in self._before:
                continue
            before = signal.signal(signum, self._note)
            earlier = getattr(before, "__self__", None)
            if isinstance(earlier, Notices):
                # One training after another: the later takes the place of the earlier.
                self.received = self.received or earlier.received
                before = earlier._before.pop(signum)
            self._before[signum] = before

    def unwatch(self) -> None:
        """Gives the signals back to the handlers that were there before."""
        for signum, before in self._before.items():
            if before is not None:  # a handler that Python does not know
                signal.signal(signum, before)
        if self._before:
            _native.end_by_sigterm()
        self._before.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        before = self._before[signum]
        if os.getpid() != self._process:
            # A fork, as pools make them, takes no part in the training.
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)
            return
        self.received = signum
        if callable(before):
            before(signum, frame)
        if signum == signal.SIGTERM and not self._will_ask():
            raise SystemExit(128 + signum)
