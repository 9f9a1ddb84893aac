"""A raw link: plain sockets that carry the bytes of a push and a pull, and compute nothing."""

from __future__ import annotations

import socket
import struct
import threading

#: Numbers of bytes that the caller sends and receives.
_HEADER = struct.Struct("<QQ")


class RawLink:
    """A connection to `serve`."""

    def __init__(self, address: str) -> None:
        """Connects."""
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray())

    def exchange(self, sent: int, received: int) -> None:
        """Sends and then receives so many bytes."""
        self._buffer = _at_least(self._buffer, max(sent, received))
        self._connection.sendall(_HEADER.pack(sent, received))
        self._connection.sendall(self._buffer[:sent])
        if not _receive(self._connection, self._buffer[:received]):
            raise ConnectionError("the other end of the raw link has closed")


def serve(address: str) -> None:
    """Serves every connection in a thread of its own, until the process ends."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)))

    def answer(connection: socket.socket) -> None:
        buffer, header = memoryview(bytearray()), memoryview(bytearray(_HEADER.size))
        while _receive(connection, header):
            received, sent = _HEADER.unpack(header)
            buffer = _at_least(buffer, max(sent, received))
            if not _receive(connection, buffer[:received]):
                return
            connection.sendall(buffer[:sent])

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _at_least(buffer: memoryview, size: int) -> memoryview:
    return buffer if len(buffer) >= size else memoryview(bytearray(size))


def _receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fills the buffer; returns False if the other end has closed."""
    while buffer and (received := connection.recv_into(buffer)):
        buffer = buffer[received:]
    return not buffer
