"""The proxy of the drills carries what an end has said, also when that end is gone."""

from __future__ import annotations

import contextlib
import socket

from faults.proxy import Flow, Proxies, _Connection

LIMIT_S = 10.0


def connection(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = stack.enter_context(socket.create_connection(server.getsockname(), LIMIT_S))
        far = stack.enter_context(server.accept()[0])
    return near, far


def test_what_an_end_said_before_it_was_gone_reaches_the_other() -> None:
    with contextlib.ExitStack() as stack:
        proxies = stack.enter_context(Proxies([]))
        stays, of_stays = connection(stack)
        goes, of_goes = connection(stack)
        of_goes.sendall(b"never read, so the close below is a reset")
        goes.sendall(b"last words")
        goes.close()
        stays.sendall(b"what can be sent to nobody")
        pumps = _Connection(proxies)
        there, back = (Flow(1, 0, "control", to_responder, 0) for to_responder in (True, False))
        pumps.pump(there, of_stays, of_goes, b"")
        pumps.pump(back, of_goes, of_stays, b"")
        assert stays.recv(64) == b"last words"
        assert stays.recv(64) == b""
