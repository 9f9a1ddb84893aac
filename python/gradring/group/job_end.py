"""The end of a job before a process has joined it: `gradring run` ends that process too.

The process cannot detect the end: nobody answers, just as before the start of the job. So the
launcher sends the signal `JOB_HAS_ENDED` repeatedly to processes that it started to join, until
they end. Processes that have joined, or still import their modules, ignore the signal; the latter
get SIGTERM after half of the grace period.
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

#: Time for the launcher to notice that a process has ended; processes with TensorFlow end slowly.
_NOTICED_S = 10.0
_LOOK_S = 0.1


@contextlib.contextmanager
def ends_with_the_job() -> Iterator[None]:
    """Inside, while a process waits for its first group, `JOB_HAS_ENDED` ends it with status 0.

    Does nothing in threads other than the main one, nor if the program handles the signal itself.

    Raises:
        gradring.errors.RendezvousError: Raised by the block; passed on after a wait for the
            launcher's signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(JOB_HAS_ENDED) != signal.SIG_DFL:
        yield
        return
    signal.signal(JOB_HAS_ENDED, _end)
    try:
        yield
    except RendezvousError:
        if "GRADRING_RESTART" in os.environ:  # the launcher sets this variable
            _wait_for_notice()
        raise
    finally:
        signal.signal(JOB_HAS_ENDED, signal.SIG_DFL)


def _wait_for_notice() -> None:
    """Waits for the launcher's signal: the other processes are gone, perhaps with success."""
    until = time.monotonic() + _NOTICED_S
    while time.monotonic() < until:
        time.sleep(_LOOK_S)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    _log.warning("the job has ended well before this process has joined it: nothing is left to do")
    raise SystemExit(0)
