"""A queue that overflows, because a disk is slow: nothing is lost unseen, by each rule."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameters import INITIAL, client, free_addresses, gradient, pulled, start

from support.waiting import wait_until

#: Twice as many as there are workers.
ROOM = 4
EVERY = 2


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "server-0"


@contextlib.contextmanager
def slow_disk(file: Path) -> Iterator[None]:
    """Who opens this file to write it waits, as the kernel lets a lease be given back first."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


@pytest.mark.parametrize(
    ("overflow", "first_dropped", "second_dropped"),
    [
        ("wait", 0, 0),
        ("drop_oldest", 1, 0),
        pytest.param("drop_newest", 0, 1, marks=pytest.mark.slow),
    ],
)
def test_what_does_not_fit_into_the_queue_is_counted_by_its_worker_and_the_server(
    overflow: str, first_dropped: int, second_dropped: int, directory: Path
) -> None:
    addresses = free_addresses(1)
    server = start(
        role="server",
        addresses=addresses,
        index=0,
        workers=2,
        overflow=overflow,
        directory=str(directory),
        snapshot_every=EVERY,
    )
    assert server.stdout is not None and server.stdout.readline() == "listens\n"
    workers = [client(addresses, worker) for worker in (0, 1)]
    first, second = workers
    weights = [np.zeros(8, np.float32) for _ in workers]
    begin_together(workers, weights)
    # The next snapshot but one, in the first term.
    with slow_disk(directory / f"snapshot-1-{2 * EVERY}.partial"):
        # The updates go on to less than two snapshots after the last one that is there.
        updates = EVERY + 2 * EVERY - 1
        for _ in range(updates + ROOM - 1):
            first.push([gradient(0)], 1.0)
            pulled(first, weights[0])
        first.push([gradient(0)], 1.0)
        told = second.stats
        wait_until(lambda: told()["servers"]["queue"] == ROOM, "the queue is full")
        second.push([gradient(1)], 1.0)
        wait_until(lambda: overflowed(told()["servers"]) == 1, "it has no room")
        # Nobody computes what would have none either.
        assert told()["servers"]["queue"] == ROOM
    for worker, values in zip(workers, weights, strict=True):
        pulled(worker, values)
    settle(workers)
    # With what has come of it all.
    second.push([None], 1.0)
    pulled(second, weights[1])
    settle(workers)
    counts = [worker.stats() for worker in workers]
    for worker in workers:
        worker.leave()
    out, errors = server.communicate(timeout=120)
    assert server.returncode == 0, errors
    stats = json.loads(out.splitlines()[-1])
    pushes, dropped = [updates + ROOM, 2], [first_dropped, second_dropped]
    assert [it["pushes"] for it in counts] == pushes
    assert [it["dropped"] for it in counts] == dropped
    applied = sum(pushes) - sum(dropped)
    assert (stats["pushes"], stats["updates"], stats["version"]) == (applied, applied, applied + 1)
    assert stats["dropped_overflow"] == sum(dropped)
    assert stats["held_overflow"] == 1 - sum(dropped)
    assert (stats["dropped_late"], stats["dropped_lost"]) == (0, 0)
    by_worker = INITIAL - weights[1][:2]
    assert list(by_worker) == [updates + ROOM - first_dropped, 1 - second_dropped]


def overflowed(servers: Any) -> int:
    return int(servers["held_overflow"] + servers["dropped_overflow"])


def settle(workers: list[Any]) -> None:
    wait_until(lambda: not any(it.stats()["unsettled"] for it in workers), "all is over")


def begin_together(workers: list[Any], weights: list[Any]) -> None:
    """Nobody begins before all are there."""
    threads = [
        threading.Thread(target=pulled, args=each) for each in zip(workers, weights, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
