"""Links of workers and parameter servers that have several TCP connections."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import numpy as np
import pytest
from parameters import (
    INITIAL,
    Servers,
    client,
    free_addresses,
    gradient,
    pulled,
    server,
    serving,
    start,
    stats_of,
    train,
)

from gradring import errors
from support.certificates import Authority
from support.proc import ESTABLISHED, tcp_sockets
from support.waiting import wait_until

OVER_TCP = {"GRADRING_TRANSPORT": "tcp"}
ELEMENTS, STEPS, SERVERS = 1 << 18, 5, 2


def trained(variables: dict[str, str]) -> tuple[bytes, int]:
    """The last weights of two workers and two servers, and the connections of a worker."""
    before = len(tcp_sockets(ESTABLISHED))
    servers = Servers(workers=2, staleness=0, combine="mean", variables=variables)
    other = start(
        role="trains",
        addresses=servers.addresses,
        index=1,
        elements=ELEMENTS,
        steps=STEPS,
        variables=variables,
    )
    worker = client(servers.addresses, 0, elements=ELEMENTS, variables=variables)
    weights = train(worker, 0, ELEMENTS, STEPS)
    connections = len(tcp_sockets(ESTABLISHED)) - before
    worker.leave()
    stats = stats_of(servers)
    assert other.communicate(timeout=120)[1] == ""
    assert [it["version"] for it in stats] == [STEPS + 1] * SERVERS
    return weights, connections


def test_a_synchronous_training_has_the_same_bits_over_any_number_of_connections(
    tmp_path: Path,
) -> None:
    tls = Authority(tmp_path).certify("all", "127.0.0.1").variables()
    expected, connections = trained(OVER_TCP)
    assert connections == SERVERS
    for streams, more in ((2, {}), (2, tls), (5, {})):
        said = {**OVER_TCP, **more, "GRADRING_STREAMS": str(streams)}
        weights, connections = trained(said)
        assert connections == streams * SERVERS
        assert weights == expected, said


def cut_connection(address: str, index: int) -> int:
    """Ends one of this process's connections to an address; how many there were."""
    host, port = address.split(":")
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists the directory has gone
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                if duplicate.family != socket.AF_INET:
                    continue
                if duplicate.getpeername() == (host, int(port)):
                    found[duplicate.getsockname()] = fd
    with socket.socket(fileno=os.dup(list(found.values())[index])) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
    return len(found)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_link_of_which_one_connection_ends_is_made_again_and_loses_no_gradient(cut: int) -> None:
    (address,) = free_addresses(1)
    variables = {**OVER_TCP, "GRADRING_STREAMS": "2"}
    before = len(tcp_sockets(ESTABLISHED))
    made = server([address], 0, 1, staleness=0, variables=variables)
    with serving([made]):
        worker, weights = client([address], 0, variables=variables), np.zeros(8, np.float32)

        def step() -> None:
            version = pulled(worker, weights)
            assert weights[0] == INITIAL - (version - 1)
            worker.push([gradient(0)], 1.0)

        step()
        assert cut_connection(address, cut) == 2
        wait_until(lambda: worker.stats()["reconnects"] == 1, "the link is made again")
        step()
        # Of each connection both ends are here.
        wait_until(
            lambda: len(tcp_sockets(ESTABLISHED)) == before + 2 * 2, "the old link is closed"
        )
        assert pulled(worker, weights) == 3
        worker.leave()


def test_processes_with_other_numbers_of_connections_are_told_both() -> None:
    addresses = free_addresses(1)
    made = server(addresses, 0, 1, variables={"GRADRING_STREAMS": "3"})
    said = r"server 0 at 127.*: worker 0 was started with streams=1, and it with streams=3; give"
    with serving([made], ends=False), pytest.raises(errors.ConfigError, match=said):
        client(addresses, 0).pull([np.zeros(8, np.float32)])


def test_processes_of_one_host_share_memory_and_keep_one_connection() -> None:
    addresses, variables = free_addresses(1), {"GRADRING_STREAMS": "4"}
    before = len(tcp_sockets(ESTABLISHED))
    with serving([server(addresses, 0, 1, variables=variables)]):
        worker = client(addresses, 0, variables=variables)
        pulled(worker, np.zeros(8, np.float32))
        assert worker.stats()["transport"] == "shm"
        assert len(tcp_sockets(ESTABLISHED)) == before + 2 * 1
        worker.leave()
