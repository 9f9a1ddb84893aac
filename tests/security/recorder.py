"""A wire that remembers what went over it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from gradring.machine.ports import free_ports

LOCAL = "127.0.0.1"


class Recorder:
    """Passes connections on to ``target`` and keeps a copy of their bytes.

    Args:
        turn_after: Of what an initiator sends, in each connection one bit is turned behind so many
            bytes; None for none.
    """

    def __init__(self, turn_after: int | None = None) -> None:
        self._turn_after = turn_after
        self.target = (LOCAL, free_ports(1)[0])
        self._seen: list[bytes] = []
        self._threads: list[threading.Thread] = []
        self._sockets = contextlib.ExitStack()
        self._listener = self._sockets.enter_context(socket.create_server((LOCAL, 0)))
        self.address = f"{LOCAL}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Recorder:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._sockets.close()

    def seen(self) -> bytes:
        return b"".join(self._seen)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                initiator = self._sockets.enter_context(self._listener.accept()[0])
                try:
                    responder = socket.create_connection(self.target)
                except OSError:  # not there yet; the initiator tries again
                    initiator.close()
                    continue
                self._sockets.enter_context(responder)
                self._start(self._pass_on, initiator, responder, self._turn_after)
                self._start(self._pass_on, responder, initiator, None)

    def _pass_on(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._seen.append(data)
                if left is not None and left < len(data):
                    data = data[:left] + bytes([data[left] ^ 0x10]) + data[left + 1 :]
                    left = None
                elif left is not None:
                    left -= len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
