"""Fixtures for the TensorFlow tests."""

import socket
from contextlib import ExitStack

import pytest


@pytest.fixture
def free_addresses():
    """A function that gives so many addresses on this machine, free a moment ago."""

    def addresses(count):
        with ExitStack() as open_sockets:
            found = []
            for _ in range(count):
                listener = open_sockets.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
                found.append(f"127.0.0.1:{listener.getsockname()[1]}")
            return found

    return addresses
