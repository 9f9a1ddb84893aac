"""Notices: signals that a scheduler sends before it ends a process, for trainings that react."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradring import _native


class Notices:
    """Records signals, so that the training can react where all ranks meet.

    Handlers only record the signal, because Python calls them in the main thread between any two
    instructions.
    """

    def __init__(self, will_ask: Callable[[], bool]) -> None:
        """Watches no signal yet.

        Args:
            will_ask: Returns whether the training will check `received` again. If not, SIGTERM ends
                the process as usual.
        """
        self._process = os.getpid()
        self._will_ask = will_ask
        self._before: dict[int, Any] = {}
        #: Number of the last signal received, or 0.
        self.received = 0

    def watch(self, *signals: int) -> None:
        """Records these signals from now on; in the main thread only.

        Raises:
            OSError: The system does not allow a handler for one of the signals.
            ValueError: A number is not a signal, or this is not the main thread.
        """
        for signum in signals:
            if signum in self._before:
                continue
            before = signal.signal(signum, self._note)
            earlier = getattr(before, "__self__", None)
            if isinstance(earlier, Notices):
                # In successive trainings, the later one replaces the earlier one.
                self.received = self.received or earlier.received
                before = earlier._before.pop(signum)
            self._before[signum] = before

    def unwatch(self) -> None:
        """Restores the handlers that were there before."""
        for signum, before in self._before.items():
            if before is not None:  # None: a handler not set by Python
                signal.signal(signum, before)
        if self._before:
            _native.end_by_sigterm()
        self._before.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        before = self._before[signum]
        if os.getpid() != self._process:
            # A forked process, such as a pool's worker, takes no part in the training.
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)
            return
        self.received = signum
        if callable(before):
            before(signum, frame)
        if signum == signal.SIGTERM and not self._will_ask():
            raise SystemExit(128 + signum)
