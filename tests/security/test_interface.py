"""``GRADRING_INTERFACE``: a rank listens there and nowhere else."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import gradring
from gradring.config.values import Settings
from gradring.errors import ConfigError, RendezvousError
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.proc import LISTEN, tcp_sockets
from support.waiting import meet


def listening() -> set[tuple[str, int]]:
    """The addresses on which this process listens."""
    return set(tcp_sockets(LISTEN))


def doors_while_forming(rendezvous: str, place: Path) -> set[tuple[str, int]]:
    """Where this rank listens while it waits for the last one, who stays away."""
    rank = int(os.environ["GRADRING_RANK"])
    meet(place, 3)
    if rank == 2:
        return set()
    seen: set[tuple[str, int]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.update(listening())
            time.sleep(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        gradring.init(timeout=4, rendezvous=rendezvous if rank == 0 else None)
    except RendezvousError:
        return seen
    finally:
        over.set()
        looking.join()
    raise AssertionError("two of three are no group")


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        pytest.param("lo", "127.0.0.1", marks=pytest.mark.slow),
        ("127.0.0.2", "127.0.0.2"),
        pytest.param("", None, marks=pytest.mark.slow),
    ],
)
def test_doors_are_on_the_chosen_interface_only(
    interface: str, address: str | None, tmp_path: Path
) -> None:
    """Rank 0's rendezvous, as it sees it, is all interfaces."""
    port = free_ports(1)[0]
    env = {
        "GRADRING_INTERFACE": interface,
        "GRADRING_RENDEZVOUS": f"{address or '127.0.0.1'}:{port}",
    }
    first, second, _ = run_ranks(doors_while_forming, 3, f"0.0.0.0:{port}", tmp_path, env=env)
    assert first == {(address or "0.0.0.0", port)}
    assert [host for host, _ in second] == [address or "127.0.0.1"]


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"GRADRING_INTERFACE='eth99' is neither .*\(.*lo"):
        Settings.from_environ({"GRADRING_INTERFACE": "eth99"})
    assert Settings.from_environ({}, interface="lo").interface == "127.0.0.1"
    assert Settings.from_environ({}, interface="::1").interface == "::1"
