"""By which address rank 0 is reached, where it has to say so itself."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from gradring.clusters import detect, own_host
from gradring.errors import ConfigError
from support.proc import has_ipv6

Rows = list[tuple[Any, ...]]


def rows(*addresses: str) -> Rows:
    return [
        (
            socket.AF_INET6 if ":" in address else socket.AF_INET,
            socket.SOCK_STREAM,
            6,
            "",
            (address, 0),
        )
        for address in addresses
    ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rows]:
    """What the names of hosts mean."""
    known: dict[str, Rows] = {}

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Rows:
        if host not in known:
            raise socket.gaierror(f"no {host}")
        return known[host]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def test_a_name_that_others_know_is_kept(names: dict[str, Rows]) -> None:
    names["node1"] = rows("10.0.0.5")
    assert own_host.reachable_host({}, "node1") == "node1"


@pytest.mark.parametrize("addresses", [["127.0.1.1"], ["::1"], ["10.0.0.5", "127.0.1.1"], None])
def test_a_name_that_means_this_host_to_itself_only_is_replaced_by_an_address(
    names: dict[str, Rows], addresses: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if addresses is not None:
        names["node1"] = rows(*addresses)
    monkeypatch.setattr(own_host, "_address_towards_anywhere", lambda: "10.0.0.5")
    assert own_host.reachable_host({}, "node1") == "10.0.0.5"
    monkeypatch.setattr(own_host, "_address_towards_anywhere", lambda: None)
    assert own_host.reachable_host({}, "node1") == "node1"


def test_the_chosen_interface_wins(names: dict[str, Rows]) -> None:
    names["node1"] = rows("10.0.0.5")
    chosen = {"GRADRING_INTERFACE": "10.1.0.5"}
    assert own_host.reachable_host(chosen, "node1") == "10.1.0.5"
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1"}
    one_host = {**mpirun, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "GRADRING_PORT": "7"}
    assert detect({**one_host, **chosen}).rendezvous == "10.1.0.5:7"
    assert detect({**one_host, "GRADRING_INTERFACE": "lo"}).rendezvous == "127.0.0.1:7"


def test_rank_0_finds_a_free_port_of_its_own_address() -> None:
    assert own_host.free_address({}, None, alone=True).startswith("127.0.0.1:")
    if has_ipv6():
        six = own_host.free_address({"GRADRING_INTERFACE": "::1"}, "node1", alone=False)
        assert six.startswith("[::1]:") and int(six.rpartition(":")[2])
    fixed = own_host.free_address({"GRADRING_PORT": "7-9"}, None, alone=True)
    assert fixed == "127.0.0.1:7"
    with pytest.raises(ConfigError, match=r"listen at 203\.0\.113\.5, .*GRADRING_INTERFACE"):
        own_host.free_address({"GRADRING_INTERFACE": "203.0.113.5"}, None, alone=False)
