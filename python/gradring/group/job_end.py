"""The end of the job before a process has joined it: `gradring run` lets that process end, too.

It cannot find out by itself: nobody answers any more, as if the job had yet to begin. So the
launcher sends `JOB_HAS_ENDED` again and again to the processes that it has started to join, until
they end. It means nothing to those that have joined, or still import their modules; the latter get
SIGTERM after half of the grace period.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from gradring.config.parse import JOB_HAS_ENDED
from gradring.errors import RendezvousError

_log = logging.getLogger("gradring")

#: How long the launcher may take to notice that a process has ended: TensorFlow's take their time.
_NOTICED_S = 10.0
_LOOK_S = 0.1


@contextlib.contextmanager
def ends_with_the_job() -> Iterator[None]:
    """Inside, where a process waits for its first group, it ends when the job has ended well.

    In other threads than the main one, and where the program has a use of its own for the signal,
    it waits as ever.

    Raises:
        gradring.errors.RendezvousError: As what is inside does.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(JOB_HAS_ENDED) != signal.SIG_DFL:
        yield
        return
    signal.signal(JOB_HAS_ENDED, _end)
    try:
        yield
    except RendezvousError:
        if "GRADRING_RESTART" in os.environ:  # a launcher has started it
            _wait_for_notice()
        raise
    finally:
        signal.signal(JOB_HAS_ENDED, signal.SIG_DFL)


def _wait_for_notice() -> None:
    """The others have gone; whether they have ended well, the launcher hears when they have."""
    until = time.monotonic() + _NOTICED_S
    while time.monotonic() < until:
        time.sleep(_LOOK_S)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    _log.warning("the job has ended well before this process has joined it: nothing is left to do")
    raise SystemExit(0)
