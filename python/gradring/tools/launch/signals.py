"""Signals as bytes on a socket, on which one can wait together with pipes."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
