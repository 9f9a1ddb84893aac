"""Servers of which each has a copy of another's part: what is lost at an awkward moment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameters import (
    INITIAL,
    Servers,
    client,
    ended,
    free_addresses,
    gradient,
    pulled,
    server,
    serving,
    start,
    stats_of,
)

from support.waiting import wait_until

#: So many that others have time to see that they are on their way, or written.
ELEMENTS = 1 << 22


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def check(worker: Any, weights: np.ndarray[Any, Any], version: int) -> None:
    """All servers have this version, and what makes it."""
    assert pulled(worker, weights) == version
    expected = INITIAL - (version - 1) * gradient(0, len(weights))
    np.testing.assert_array_equal(weights, expected)


def push(worker: Any, elements: int) -> None:
    """Pushes, and waits until all copies have applied it."""
    assert worker.push([gradient(0, elements)], 1.0)
    wait_until(lambda: not worker.stats()["unsettled"], "it is applied")


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_server_that_is_lost_again_while_it_is_filled_takes_nothing_back(lost: int) -> None:
    addresses = free_addresses(2)
    other = server(addresses, 1 - lost, 1, replicas=1)

    def begin() -> subprocess.Popen[str]:
        return start(role="server", addresses=addresses, index=lost, workers=1, replicas=1)

    def fills(before: int) -> None:
        # The worker is idle: what is sent is for the server.
        some = before + ELEMENTS
        wait_until(lambda: other.stats()["bytes_sent"] >= some, "it is being filled", pause_s=0)

    process = begin()
    with serving([other]):
        worker = client(addresses, 0, elements=ELEMENTS)
        weights = np.zeros(ELEMENTS, np.float32)
        check(worker, weights, 1)
        push(worker, ELEMENTS)
        for life in range(2):
            end(process)
            before = other.stats()["bytes_sent"]
            process = begin()
            fills(before)
            end(process)
            process = begin()
            check(worker, weights, 2 + life)
            push(worker, ELEMENTS)
        check(worker, weights, 4)
        worker.leave()
    (stats,) = stats_of([process])
    kept = other.stats()
    assert stats["version"] == kept["version"] == 4
    assert [tuple(it) for it in (*stats["replicas"], *kept["replicas"])] == [
        (4, kept["history"]),
        (4, stats["history"]),
    ]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_snapshot_that_a_loss_cuts_short_counts_for_nobody(lost: int, tmp_path: Path) -> None:
    servers = Servers(tmp_path, workers=1, staleness=0, replicas=1)

    def has_begun_to_write() -> bool:
        # On a fast machine it may be whole already.
        return any(servers.directory(lost).glob("snapshot-*-5*"))

    worker = client(servers.addresses, 0, elements=ELEMENTS)
    weights = np.zeros(ELEMENTS, np.float32)
    for version in range(1, 5):
        check(worker, weights, version)
        assert worker.push([gradient(0, ELEMENTS)], 1.0)
    wait_until(has_begun_to_write, "a snapshot is being written", pause_s=0)
    servers.lose(lost)
    for version in range(5, 8):
        check(worker, weights, version)
        assert worker.push([gradient(0, ELEMENTS)], 1.0)
    check(worker, weights, 8)
    # Nobody has a copy in memory any more.
    servers.lose(0, 1)
    # It counts only if what it was computed with is not given up.
    worker.push([gradient(0, ELEMENTS)], 1.0)
    version = pulled(worker, weights)
    assert version <= 9
    np.testing.assert_array_equal(weights, INITIAL - (version - 1) * gradient(0, ELEMENTS))
    worker.push([gradient(0, ELEMENTS)], 1.0)
    check(worker, weights, version + 1)
    worker.leave()
    stats = stats_of(servers)
    assert {(it["version"], it["history"]) for it in stats} == {tuple(stats[0]["replicas"][0])}


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_leaves_while_a_server_is_lost_has_left(lost: int) -> None:
    servers = Servers(workers=2, replicas=1, worker_timeout=0.5)
    stays, leaves = (client(servers.addresses, it) for it in range(2))
    weights = np.zeros(8, np.float32)
    check(stays, weights, 1)
    assert pulled(leaves, weights) == 1
    push(stays, 8)
    push(leaves, 8)
    servers.lose(lost)
    leaves.leave()
    pulled(stays, weights)
    push(stays, 8)
    check(stays, weights, 4)
    stays.leave()
    stats = stats_of(servers)
    assert {(it["version"], it["history"]) for it in stats} == {tuple(stats[0]["replicas"][0])}


def test_with_copies_servers_are_replaced_one_after_the_other_and_take_nothing_back() -> None:
    servers = Servers(workers=1, staleness=0, replicas=1)
    worker, weights = client(servers.addresses, 0), np.zeros(8, np.float32)
    for version in range(1, 24):
        # In the end, no process is left of those that began, and none has a disk.
        check(worker, weights, version)
        worker.push([gradient(0)], 1.0)
        if version % 8 == 0:
            servers.lose(version // 8 % 2)
    worker.leave()
    stats = stats_of(servers)
    assert {(it["version"], it["history"]) for it in stats} == {tuple(stats[0]["replicas"][0])}
    assert stats[1]["replicas"] == stats[0]["replicas"]


def test_a_restored_server_waits_for_who_had_left_before_no_longer_than_for_who_is_lost() -> None:
    servers = Servers(workers=2, replicas=1, worker_timeout=0.5)
    stays, leaves = (client(servers.addresses, it) for it in range(2))
    weights = np.zeros(8, np.float32)
    assert pulled(stays, weights) == 1
    leaves.leave()
    servers.lose(0)
    stays.push([gradient(0)], 1.0)
    wait_until(lambda: not stays.stats()["unsettled"], "it is applied")
    assert pulled(stays, weights) == 2
    stays.leave()
    # The timeout, for which workers are waited for at first, is longer than this.
    ended(servers)


def test_when_all_servers_are_lost_after_one_was_training_goes_on_from_a_workers_weights() -> None:
    servers = Servers(workers=1, replicas=1)
    worker, weights = client(servers.addresses, 0), np.zeros(8, np.float32)
    for _ in range(3):
        pulled(worker, weights)
        worker.push([gradient(0)], 1.0)
    servers.lose(1)
    assert pulled(worker, weights) == 4
    # The servers of before had begun anew once, and these have not: their terms are the lesser.
    servers.lose(0, 1)
    worker.push([gradient(0)], 1.0)
    for version in range(1, 4):
        check(worker, weights, version)
        worker.push([gradient(0)], 1.0)
    worker.leave()
    ended(servers)
