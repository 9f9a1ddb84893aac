"""The first process of a container: passes signals on, and collects what nobody else collects.

Linux makes it the parent of every process whose own parent has ended, and keeps what is left of
these until it asks. `gradring run` asks after its own ranks only, so there it works in a child.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from gradring.launch.processes import shell_exit_code
from gradring.launch.signals import HANDLED


def in_child(work: Callable[[], int]) -> int:
    """Does the work, in a child if this is the first process; must be called before any thread.

    Returns:
        What the work returns, or the exit code of the child, as a shell has it.
    """
    if os.getpid() != 1:
        return work()
    awaited = {*HANDLED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return work()
    while True:
        arrived = signal.sigwaitinfo(awaited)
        if arrived.si_signo == signal.SIGCHLD:
            exit_code = _collected(child)
            if exit_code is not None:
                return exit_code
        # What a terminal sends, it sends to the child, too; only processes have a code up to 0.
        elif arrived.si_code <= 0:
            os.kill(child, arrived.si_signo)


def _collected(child: int) -> int | None:
    """Collects all that have ended; the exit code of the child if it is among them."""
    process = -1
    while process != child:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return None
    return shell_exit_code(os.waitstatus_to_exitcode(status))
