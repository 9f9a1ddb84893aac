"""Signals as bytes on a socket, so that one select call waits for them and for pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

#: Signals for the ranks only; batch systems send them some time before the end of a job.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
#: Signals that stop the job, as Ctrl-Z does, and continue it.
SUSPEND, RESUME = signal.SIGTSTP, signal.SIGCONT
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES, SUSPEND, RESUME)


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """Makes a socket from which the numbers of arriving signals are read, including SIGCHLD.

    Ignored signals, as under nohup and in the background of a script, stay ignored. Must be called
    from the main thread.

    Yields:
        The socket, which never blocks; each byte is the number of a signal.
    """
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        handled = {signal.SIGCHLD, *(s for s in HANDLED if signal.getsignal(s) != signal.SIG_IGN)}
        previous_fd = signal.set_wakeup_fd(sender.fileno())
        previous = {signum: signal.signal(signum, lambda *_: None) for signum in handled}
        try:
            yield receiver
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(previous_fd)


def arrived(receiver: socket.socket) -> list[int]:
    """Returns the numbers of the signals that have arrived, without SIGCHLD."""
    return [signum for signum in receiver.recv(4096) if signum != signal.SIGCHLD]


def stop_here() -> None:
    """Stops this process, and returns when it is continued.

    At a terminal without a shell that could continue it, the kernel does not stop the process.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:  # no terminal: a batch system can always continue it
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    before = signal.signal(SUSPEND, signal.SIG_DFL)
    os.kill(os.getpid(), SUSPEND)
    signal.signal(SUSPEND, before)
