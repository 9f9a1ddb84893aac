"""Duties of a container's first process: forwarding signals and reaping orphans.

Linux makes the first process the parent of every orphan, which stays a zombie until that parent
collects its exit code. `gradring run` waits for its own ranks only, so as first process it works in
a child.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from gradring.launch.processes import shell_exit_code
from gradring.launch.signals import HANDLED


def in_child(work: Callable[[], int]) -> int:
    """Runs `work`, in a child if this is process 1; must be called before any thread starts.

    Returns:
        The result of `work`, or the exit code of the child in a shell's form.
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
        # A terminal's signal (code above 0) reaches the child anyway; a process's does not.
        elif arrived.si_code <= 0:
            os.kill(child, arrived.si_signo)


def _collected(child: int) -> int | None:
    """Reaps all ended processes; returns the exit code of the child if it is among them."""
    process = -1
    while process != child:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return None
    return shell_exit_code(os.waitstatus_to_exitcode(status))
