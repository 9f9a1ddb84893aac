"""Ports that a firewall admits: each rank listens at one of these, and says so where it cannot."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import Any

import pytest

import gradring
from gradring.config import parse
from gradring.errors import ConfigError, RendezvousError
from gradring.launch.ranks import rank_environments
from gradring.machine import ports
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.testing import run_ranks
from support.proc import LISTEN, tcp_sockets


def listening_ports() -> set[int]:
    """The ports at which this process listens."""
    return {port for _, port in tcp_sockets(LISTEN)}


def join_within(first: int, last: int, by_argument: bool) -> set[int]:
    if not by_argument:
        os.environ["GRADRING_PORT"] = f"{first}-{last}"
    with gradring.init(port=f"{first}-{last}" if by_argument else None) as comm:
        comm.barrier()
        found = listening_ports()
        comm.barrier()
    return found


def free_range(length: int) -> tuple[int, int]:
    """Free ports in a row; nobody takes one by chance, because they are not ephemeral."""
    for first in free_ports(50):
        try:
            for port in range(first, first + length):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first, first + length - 1
    raise AssertionError("no free ports in a row")


@pytest.mark.parametrize("by_argument", [False, True])
def test_ranks_of_one_host_share_a_range(by_argument: bool) -> None:
    first, last = free_range(4)
    with socket.create_server(("127.0.0.1", first + 1)):  # somebody else's
        found: list[set[int]] = run_ranks(join_within, 3, first, last, by_argument)
    assert all(len(ports) == 1 for ports in found)
    rank_0, *others = (ports.pop() for ports in found)
    assert rank_0 not in others
    assert set(others) <= {first, first + 2, first + 3} and len(set(others)) == 2


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as rank_0,  # says nothing, and need not
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        rendezvous, port = f"127.0.0.1:{rank_0.getsockname()[1]}", taken.getsockname()[1]
        with pytest.raises(RendezvousError) as raised:
            gradring.init(rank=1, world_size=2, rendezvous=rendezvous, token="t", port=port)
    assert f"rank 1 on {socket.gethostname()}: cannot listen on 127.0.0.1:{port}: " in str(
        raised.value
    )
    assert "GRADRING_PORT takes a range such as 29500-29515" in str(raised.value)


@pytest.mark.parametrize("given", ["29500", " 29500 ", 29500, "29500-29500", "029500 - 29500"])
def test_a_port_alone_is_a_range_of_one(given: Any) -> None:
    assert parse.ports(given, "port") == (29500, 29500)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "0",
        "65536",
        "http",
        "7-6",
        "1-",
        "-5",
        "1-2-3",
        0,
        65536,
        -1,
        True,
        1.5,
        None,
        "9" * 5000,
    ],
)
def test_what_is_no_port_is_named(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"port=.* is neither a port from 1 to 65535 nor a range"):
        parse.ports(given, "port")


def test_gradring_run_puts_rank_0_at_the_first_port() -> None:
    ranks = rank_environments({"GRADRING_PORT": "29500-29515"}, 2)
    for environ in ranks:
        assert environ["GRADRING_RENDEZVOUS"] == "127.0.0.1:29500"
        assert '"127.0.0.1:29500"' in environ["TF_CONFIG"]
    assert rank_environments({}, 2)[0]["GRADRING_RENDEZVOUS"] != "127.0.0.1:29500"


@pytest.mark.parametrize(
    ("held_at", "wanted_at"), [(LOOPBACK, LOOPBACK), ("0.0.0.0", LOOPBACK), (LOOPBACK, "0.0.0.0")]
)
def test_a_port_of_one_job_is_not_chosen_for_another(
    monkeypatch: pytest.MonkeyPatch, held_at: str, wanted_at: str
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(ports, "_candidates", lambda: [port])
    with ExitStack() as held:
        assert free_ports(1, held_at, held=held) == [port]
        assert free_ports(1, wanted_at) != [port]
        for _ in range(2):  # a rank, and its replacement
            with socket.create_server((wanted_at, port)):
                assert free_ports(1, held_at) != [port]
    assert free_ports(1, wanted_at) == [port]


def take_the_rendezvous_before_it_is_used() -> str:
    rendezvous = os.environ["GRADRING_RENDEZVOUS"]
    with socket.socket() as other:
        try:
            other.bind((LOOPBACK, int(rendezvous.rpartition(":")[2])))
        except OSError as error:
            taken = os.strerror(error.errno or 0)
        else:
            taken = "free"
    with gradring.init() as comm:
        comm.barrier()
    return taken


def test_the_rendezvous_of_ranks_is_held_until_they_listen() -> None:
    assert run_ranks(take_the_rendezvous_before_it_is_used, 1) == ["Address already in use"]
