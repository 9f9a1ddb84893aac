"""Signals as bytes on a socket, on which one can wait together with pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

#: Those that only the ranks are to hear, as batch systems send them some time before the end.
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
#: That stops the job, as Ctrl-Z, and that continues it.
SUSPEND, RESUME = signal.SIGTSTP, signal.SIGCONT
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES, SUSPEND, RESUME)


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """A socket from which the numbers of arriving signals are read, SIGCHLD among them.

    Signals that are ignored, as under nohup and in the background of a script, stay ignored. Must
    be called from the main thread.

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
    """The numbers of the signals that can be read now, but for those of children."""
    return [signum for signum in receiver.recv(4096) if signum != signal.SIGCHLD]


def stop_here() -> None:
    """Stops this process, as it has been asked to; returns when it is continued.

    At a terminal where no shell could continue it, it goes on at once, as any program does there.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:  # a batch system, which knows what it does
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    before = signal.signal(SUSPEND, signal.SIG_DFL)
    os.kill(os.getpid(), SUSPEND)
    signal.signal(SUSPEND, before)
