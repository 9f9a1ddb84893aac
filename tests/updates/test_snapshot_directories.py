"""Directories of snapshots: servers go on from what they find, begin anew, or refuse it by name."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameters import (
    INITIAL,
    SGD,
    client,
    free_addresses,
    gradient,
    pulled,
    server,
    serving,
)

from gradring import errors
from gradring._native import ParameterServer
from support.waiting import wait_until

#: Updates of the job that was here before, and between two of its snapshots.
STEPS, EVERY = 12, 5
#: The version of its last snapshots; the first version has the initial weights.
LAST = (1 + STEPS) // EVERY * EVERY
BEFORE_LAST = LAST - EVERY


def at(version: int) -> float:
    """The weight of a version."""
    return INITIAL - (version - 1)


def made_in(directory: Path, servers: int, **rules: Any) -> tuple[list[str], list[ParameterServer]]:
    """Servers with these addresses, which have their directories in this one."""
    addresses = free_addresses(servers)
    rules = {"staleness": 0, "snapshot_every": EVERY, "workers": 1, **rules}
    return addresses, [
        server(addresses, index, directory=directory / f"server-{index}", **rules)
        for index in range(servers)
    ]


def push(
    addresses: list[str], steps: int, *, worker: int = 0, name: str = "weights", leaves: bool = True
) -> list[float]:
    """Steps of a worker; the weight with which each began."""
    one, weights = client(addresses, worker, begins=False), np.zeros(8, np.float32)
    one.begin([(name, (8,), "float32", False)], SGD)
    found = []
    try:
        for _ in range(steps):
            pulled(one, weights)
            found.append(float(weights[worker]))
            one.push([gradient(worker)], 1.0)
        pulled(one, weights)
        if leaves:
            one.leave()
    finally:
        one.close()
    return found


def snapshots(directory: Path) -> list[int]:
    """The versions of those that are whole."""
    return sorted(int(it.name.split("-")[-1]) for it in directory.glob("snapshot-*[0-9]"))


def finished(directory: Path, servers: int = 1) -> None:
    """Leaves what a job leaves that has ended well."""
    addresses, made = made_in(directory, servers)
    with serving(made) as raised:
        push(addresses, STEPS)
    assert not raised


def wait_for_last(directory: Path) -> None:
    wait_until(lambda: LAST in snapshots(directory), "the last snapshot is there")


def killed(directory: Path, servers: int = 1) -> None:
    """Leaves what a job leaves of which all processes were killed."""
    addresses, made = made_in(directory, servers)
    with serving(made, ends=False):
        push(addresses, STEPS, leaves=False)
        for own in directory.iterdir():
            wait_for_last(own)


def begins_with(directory: Path, servers: int = 1, *, name: str = "weights", **rules: Any) -> float:
    """The weight with which the next job begins, which then ends well."""
    addresses, made = made_in(directory, servers, **rules)
    with serving(made) as raised:
        found = push(addresses, 1, name=name)
    assert not raised
    return found[0]


def said(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """A thread of its own logs."""
    wait_until(lambda: what in caplog.text, f"it says: {what}")


@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_job_is_gone_on_with_and_says_from_where(
    servers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path, servers)
    assert begins_with(tmp_path, servers) == at(LAST)
    said(caplog, f"all servers go on from snapshot {LAST} of {tmp_path}/server-0")


@pytest.mark.parametrize(
    "rules",
    [
        {"staleness": None},
        {"staleness": None, "aggregate": 2, "workers": 1},
        {"snapshot_every": 3},
        {"late": "drop"},
        {"combine": "mean"},
    ],
)
def test_a_killed_job_may_be_gone_on_with_by_another_rule(
    rules: dict[str, Any], tmp_path: Path
) -> None:
    killed(tmp_path)
    addresses, made = made_in(tmp_path, 1, **rules)
    with serving(made) as raised:
        # With `aggregate`, one gradient is no update yet.
        assert push(addresses, 1)[0] == at(LAST)
    assert not raised


def test_copies_may_be_added_to_a_killed_job(tmp_path: Path) -> None:
    killed(tmp_path, 2)
    assert begins_with(tmp_path, 2, replicas=1) == at(LAST)


def test_a_finished_job_is_not_gone_on_with_and_keeps_its_snapshots_until_the_next_has_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "server-0.finished"
    finished(tmp_path)
    assert snapshots(kept)[-1] == LAST and not (tmp_path / "server-0").exists()
    assert begins_with(tmp_path) == INITIAL
    said(caplog, f"begins anew: the last job here has finished, and {kept} keeps its snapshots")
    assert snapshots(kept) == [1]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_finished_job_is_gone_on_with_by_choice(servers: int, tmp_path: Path) -> None:
    finished(tmp_path, servers)
    for index in range(servers):
        (tmp_path / f"server-{index}.finished").rename(tmp_path / f"server-{index}")
    assert begins_with(tmp_path, servers) == at(LAST)


def test_after_a_finished_job_there_may_be_other_servers_and_another_model(tmp_path: Path) -> None:
    finished(tmp_path, 2)
    assert begins_with(tmp_path, 1, name="others") == INITIAL
    assert begins_with(tmp_path, 3) == INITIAL


def test_servers_without_a_snapshot_in_common_begin_anew_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path, 2)
    shutil.rmtree(tmp_path / "server-1")
    assert begins_with(tmp_path, 2) == INITIAL
    said(caplog, "all servers begin anew: they have no snapshot in common")


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def change(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)


def make_unreadable(file: Path) -> None:
    """Root reads whatever its mode says."""
    file.unlink()
    file.mkdir()


DAMAGES = [cut, empty, change, make_unreadable]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_is_passed_over(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path)
    (last,) = (tmp_path / "server-0").glob(f"snapshot-*-{LAST}")
    damage(last)
    assert begins_with(tmp_path) == at(BEFORE_LAST)
    said(caplog, f"passes a snapshot over: cannot read {last}: ")
    said(caplog, f"all servers go on from snapshot {BEFORE_LAST} of ")


def test_a_snapshot_that_is_half_written_is_removed(tmp_path: Path) -> None:
    killed(tmp_path)
    half = tmp_path / "server-0" / f"snapshot-1-{LAST + EVERY}.partial"
    half.write_bytes(b"half")
    assert begins_with(tmp_path) == at(LAST)
    assert not list(tmp_path.glob("*/*.partial"))


def refused(directory: Path, servers: int = 1, **rules: Any) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        made_in(directory, servers, **rules)
    assert len(str(caught.value)) < 300 + len(str(directory))
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (2, 1, "has the snapshots of a job with 2 parameter servers, and this job has 1; start as"),
        (1, 2, "has the snapshots of a job with 1 parameter server, and this job has 2; start as"),
        (3, 2, "has the snapshots of a job with 3 parameter servers, and this job has 2; start as"),
    ],
)
def test_another_number_of_servers_is_named(
    before: int, now: int, says: str, tmp_path: Path
) -> None:
    killed(tmp_path, before)
    assert f"{tmp_path}/server-0 {says}" in refused(tmp_path, now)
    # Nothing has changed.
    assert begins_with(tmp_path, before) == at(LAST)


def test_the_directory_of_another_server_is_named(tmp_path: Path) -> None:
    killed(tmp_path, 2)
    first, second = tmp_path / "server-0", tmp_path / "server-1"
    first.rename(tmp_path / "moved")
    second.rename(first)
    (tmp_path / "moved").rename(second)
    says = "server-0 has the snapshots of server 1 of 2, and this is server 0"
    assert says in refused(tmp_path, 2)


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_damaged_or_missing_terms_are_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    killed(tmp_path)
    terms = tmp_path / "server-0" / "terms"
    damage(terms)
    assert f"cannot read {terms}: " in refused(tmp_path)
    # Whatever is wrong with it, its snapshots are still there.
    assert LAST in snapshots(tmp_path / "server-0")


def test_a_directory_that_a_living_process_has_is_named(tmp_path: Path) -> None:
    _, (living,) = made_in(tmp_path, 1)
    assert "has the snapshots of another living process" in refused(tmp_path)
    living.close()


def test_what_is_no_directory_or_has_too_long_a_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "server-0").write_text("a file")
    assert f"cannot make {tmp_path}/server-0: " in refused(tmp_path)
    assert ": File name too long" in refused(tmp_path / ("d" * 300))


def test_a_worker_with_another_model_is_told_whose_snapshots_there_are(tmp_path: Path) -> None:
    killed(tmp_path)
    addresses, made = made_in(tmp_path, 1)
    with serving(made, ends=False):
        says = "server-0 has the snapshots of a job whose variables, optimizer or placement differ"
        with pytest.raises(errors.ConfigError, match=says):
            push(addresses, 1, name="others")
        # The one whose they are is let in.
        assert push(addresses, 1)[0] == at(LAST)


@pytest.mark.parametrize("staleness", [0, None])
def test_a_job_that_goes_on_from_snapshots_waits_for_all_workers_as_a_first_one_does(
    staleness: int | None, tmp_path: Path
) -> None:
    killed(tmp_path)
    addresses, (made,) = made_in(tmp_path, 1, workers=2, staleness=staleness)
    steps = 10
    with serving([made]) as raised:
        first = threading.Thread(target=push, args=[addresses, steps])
        first.start()
        wait_until(lambda: made.stats()["members"] == [0], "one is there")
        # It asks four times a second, and survivors are waited for during one.
        asked: set[int] = set()

        def has_asked() -> bool:
            asked.add(made.stats()["bytes_received"])
            return len(asked) > 10

        wait_until(has_asked, "it has asked many times")
        assert made.stats()["version"] == LAST
        push(addresses, steps, worker=1)
        first.join()
    assert not raised
    counts = made.stats()
    # Without rounds, a worker may leave before its last gradients are in an update.
    dropped = 0 if staleness == 0 else counts["dropped_lost"]
    assert counts["pushes"] + dropped == 2 * steps
    updates = steps if staleness == 0 else counts["pushes"]
    assert counts["version"] == LAST + updates
