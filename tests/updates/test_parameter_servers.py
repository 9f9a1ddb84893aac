"""Parameter servers among processes, some of which are killed.

Nothing hangs, and every gradient counts once or not at all.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from parameters import (
    INITIAL,
    SGD,
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

import gradring
from gradring import errors
from gradring._native import ParameterClient, ParameterServer
from gradring.config.values import DEFAULTS
from support.certificates import Authority
from support.chosen import marked_rows
from support.proc import descriptors
from support.waiting import wait_until

PHASES = ("before the pull", "in the pull", "before the push", "in the push", "after the push")
SLOW = pytest.mark.slow
#: Each phase, each server, and both with and without copies.
QUICK = (
    ("before the pull", None, 0),
    ("in the pull", 0, 1),
    ("before the push", None, 0),
    ("in the push", 1, 1),
    ("after the push", 0, 0),
)
CASES = [
    *((phase, None, 0) for phase in PHASES),
    *((phase, server, replicas) for phase in PHASES for server in (0, 1) for replicas in (0, 1)),
]


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=SLOW)])
@pytest.mark.parametrize("staleness", [None, *(pytest.param(it, marks=SLOW) for it in (0, 2))])
@pytest.mark.parametrize(
    ("dies", "lost", "replicas"),
    marked_rows(CASES, QUICK),
)
def test_a_killed_worker_stops_nobody_and_counts_what_was_applied(
    dies: str,
    lost: int | None,
    replicas: int,
    staleness: int | None,
    transport: str,
    tmp_path: Path,
) -> None:
    elements, snapshot_every = 1 << 18, 5
    servers = Servers(
        tmp_path,
        workers=2,
        snapshot_every=snapshot_every,
        staleness=staleness,
        replicas=replicas,
        worker_timeout=0.5,
        transport=transport,
    )
    victim = start(
        role="worker",
        addresses=servers.addresses,
        index=1,
        elements=elements,
        dies=dies,
        directories=[str(servers.directory(index)) for index in range(2)],
        too=[] if lost is None else [servers[lost].pid],
        transport=transport,
    )
    mender = threading.Thread(target=servers.begin_again, args=[lost])
    if lost is not None:
        mender.start()
    worker = client(servers.addresses, 0, elements=elements, transport=transport)
    weights = np.zeros(elements, np.float32)
    versions, more = [0], 6
    while more:
        # Fewer than two snapshots' updates are given up with a server, and none with copies.
        versions.append(pulled(worker, weights))
        given_up = 0 if lost is None or replicas else 2 * snapshot_every
        assert versions[-1] >= versions[-2] - given_up
        worker.push([gradient(0, elements)], 1.0)
        more -= victim.poll() is not None
    pulled(worker, weights)
    # An asynchronous worker goes on before its gradients are applied.
    wait_until(lambda: not worker.stats()["unsettled"], "nothing is on its way")
    nothing = 0 if staleness == 0 else int(worker.push([None], 1.0))
    if nothing:
        pulled(worker, weights)
        # What is queued when a worker leaves is dropped.
        wait_until(lambda: not worker.stats()["unsettled"], "the last one is not on its way")
    worker.leave()
    if lost is not None:
        mender.join()
    stats = stats_of(servers)
    printed = victim.communicate(timeout=120)
    assert victim.returncode == -9, printed
    assert stats[0]["history"] == stats[1]["history"]
    assert stats[0]["applied"] == stats[1]["applied"]
    mine, its = (float(INITIAL - it) for it in weights[:2])
    np.testing.assert_array_equal(weights[:2], weights[:-3:-1])
    assert its <= 4
    version = stats[0]["version"]
    kept = [version, stats[0]["history"]]
    assert [it["replicas"] for it in stats] == [[kept] * replicas] * 2
    if staleness == 0:
        # Each update has a gradient of this worker, and all that it had were in one.
        assert mine == version - 1
    else:
        assert 1 + mine + its + nothing == version
    if lost is None:
        assert (mine, stats[0]["pushes"]) == (len(versions) - 1, mine + its + nothing)
        assert its >= 2


def snapshots_in(directory: Path) -> list[Path]:
    """By version; what is being written is none yet."""
    files = directory.glob("snapshot-*[0-9]")
    return sorted(files, key=lambda it: int(it.name.split("-")[-1]))


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def changed(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)


@pytest.mark.parametrize(
    ("lost", "damage"),
    [
        pytest.param(0, None, marks=SLOW),
        (1, None),
        (0, cut_short),
        pytest.param(1, changed, marks=SLOW),
    ],
)
def test_a_killed_server_is_restored_and_every_gradient_counts_once(
    lost: int, damage: Callable[[Path], None] | None, tmp_path: Path
) -> None:
    damaged = None
    # Without a bound, a pull may find one server an update further than the other.
    servers = Servers(tmp_path, workers=1, staleness=0)
    directory = servers.directory(lost)
    worker, weights = client(servers.addresses, 0), np.zeros(8, np.float32)
    for life in range(2):
        for _ in range(12):
            version = pulled(worker, weights)
            # The first version has the initial weights.
            assert weights[0] == INITIAL - (version - 1)
            worker.push([gradient(0)], 1.0)
        if life == 0:
            wait_until(lambda: len(snapshots_in(directory)) > 1, "two snapshots")
            servers[lost].kill()
            servers[lost].wait()
            whole = snapshots_in(directory)
            if damage is not None:
                damaged = whole.pop()
                damage(damaged)
            servers.begin_again(lost)
            # What was on its way counts once, or is taken back.
            restored = pulled(worker, weights)
            assert weights[0] == INITIAL - (restored - 1)
            assert restored > version - (2 if damage is None else 3) * 5
            assert damage is None or restored >= int(whole[-1].name.split("-")[-1])
            worker.push([gradient(0)], 1.0)
    worker.leave()
    lines = [line for _, errors in ended(servers) for line in errors.splitlines()]
    assert len([line for line in lines if "all servers go on from snapshot" in line]) == 1
    warned = [line for line in lines if "passes a snapshot over" in line]
    assert len(warned) == (damaged is not None)
    assert damaged is None or str(damaged) in warned[0]


def test_a_server_whose_disk_is_gone_goes_on_and_writes_its_snapshot_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "snapshots"
    addresses = free_addresses(1)
    made = server(addresses, 0, 1, directory=str(directory), snapshot_every=5)
    with serving([made]) as raised:
        worker, weights = client(addresses, 0), np.zeros(8, np.float32)

        def push(updates: int) -> None:
            for _ in range(updates):
                pulled(worker, weights)
                worker.push([gradient(0)], 1.0)

        push(1)
        wait_until(lambda: bool(snapshots_in(directory)), "the first snapshot is there")
        directory.rename(tmp_path / "away")
        push(7)
        wait_until(lambda: "without a snapshot of version 5" in caplog.text, "it is missed")
        (tmp_path / "away").rename(directory)
        push(15)
        last = "snapshot-1-20"
        wait_until(lambda: last in [it.name for it in snapshots_in(directory)], "all are there")
        worker.leave()
    assert not raised
    assert "has written its snapshot of version 5 after" in caplog.text


def test_what_is_in_no_update_when_its_worker_leaves_is_dropped_and_counted() -> None:
    addresses = free_addresses(1)
    made = server(addresses, 0, 1, aggregate=2)
    with serving([made]):
        worker, weights = client(addresses, 0), np.zeros(8, np.float32)
        pulled(worker, weights)
        for _ in range(3):
            worker.push([gradient(0)], 1.0)
            pulled(worker, weights)
        worker.leave()
    stats = made.stats()
    assert (stats["version"], stats["dropped_lost"]) == (2, 1)
    assert (stats["updates"], stats["pushes"]) == (1, 2)
    told = worker.stats()
    assert (told["pushes"], told["dropped"], told["unsettled"]) == (3, 1, 0)


def test_arrays_of_each_dtype_go_to_servers_and_come_back_with_their_digits() -> None:
    addresses = free_addresses(2)
    servers = [server(addresses, index, 1) for index in range(2)]
    dtypes: dict[str, Any] = {
        "float64": np.float64,
        "bfloat16": ml_dtypes.bfloat16,
        "float32": np.float32,
        "float16": np.float16,
    }
    weights = [np.linspace(0, 1, 6).astype(it).reshape(3, 2) for it in dtypes.values()]
    with serving(servers):
        worker = client(addresses, 0, begins=False)
        worker.begin([(name, (3, 2), name, False) for name in dtypes], SGD)
        found = [np.zeros_like(each) for each in weights]
        assert worker.pull(found) is None
        worker.push_initial(weights)
        worker.pull(found)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in weights]
        for wrong in dtypes.values():
            mixed = [found[0], found[1].astype(wrong), *found[2:]]
            if wrong is not ml_dtypes.bfloat16:
                with pytest.raises(TypeError, match="numpy array of bfloat16; it is of float"):
                    worker.push(mixed, 1.0)
        thirds = [np.full((2, 2), 1 / 3).astype(each.dtype) for each in weights]
        rows = np.array([2, 2])
        worker.push([(rows, each) for each in thirds], 1.0)
        worker.pull(found)
        for each, before, third in zip(found, weights, thirds, strict=True):
            # Sums of 16-bit floats are float32, and rounded once.
            sums = (2 * third[0].astype(np.float64)).astype(each.dtype)
            np.testing.assert_array_equal(each[:2], before[:2])
            np.testing.assert_array_equal(each[2], before[2] - sums)
        worker.leave()


def test_weights_rows_and_placement_arrive_where_they_belong() -> None:
    addresses = free_addresses(2)
    servers = [server(addresses, index, 1) for index in range(2)]
    table, bias = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([5, 6], np.float32)
    with serving(servers):
        worker = client(addresses, 0, begins=False)
        rates = '"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": false'
        adam = f'{{"adam": {{{rates}}}}}'
        variables = [("table", (6, 2), "float32", True), ("bias", (2,), "float32", False)]
        for wrong in (
            '{"rmsprop": {}}',
            f'{{"adam": {{{rates}, "momentum": 0.5}}}}',
            '{"sgd": {"momentum": 0.5}}',
            '{"sgd": {"momentum": NaN, "nesterov": false}}',
        ):
            with pytest.raises(errors.ConfigError, match="optimizer"):
                worker.begin(variables, wrong)
        with pytest.raises(errors.ConfigError, match="keep: float32, float64, bfloat16, float16"):
            worker.begin([("table", (6, 2), "int32", True)], adam)
        with pytest.raises(errors.ConfigError, match="placement"):
            worker.begin(variables, adam, {1: 2})
        with pytest.raises(errors.GradringError, match="out of turn"):
            worker.pull([table, bias])
        worker.begin(variables, SGD, {1: 1})
        found = [np.zeros((6, 2), np.float32), np.zeros(2, np.float32)]
        columns = np.asfortranarray(table)
        with pytest.raises(ValueError, match=r"into\[0\] \(table\) is not C-contiguous"):
            worker.pull([columns.copy("F"), found[1]])
        assert worker.pull(found) is None
        with pytest.raises(ValueError, match="not C-contiguous"):
            worker.push_initial([columns, bias])
        assert worker.push_initial([table, bias])
        assert worker.pull(found) == 1
        np.testing.assert_array_equal(found[0], table)
        for wrong_gradient in (
            [table],
            [table.astype(np.float64), bias],
            [table[:5], bias],
            [table[:, ::-1], bias],
            [columns, bias],
            [(np.arange(6), columns), bias],
            [(np.array([6]), table[:1]), bias],
            [(np.array([0, 1]), table[:1]), bias],
        ):
            with pytest.raises((TypeError, ValueError)):
                worker.push(wrong_gradient, 1.0)
        rows = np.array([[1, 1], [10, 10], [100, 100]], np.float32)
        assert worker.push([(np.array([5, 0, 5]), rows), None], 1.0)
        assert worker.pull(found) == 2
        table[5] -= 101
        table[0] -= 10
        np.testing.assert_array_equal(found[0], table)
        np.testing.assert_array_equal(found[1], bias)
        with pytest.raises(errors.GradringError, match="out of turn"):
            worker.pull(found)
        worker.leave()
        with pytest.raises(errors.AbortedError, match="closed"):
            worker.pull(found)


def shared_memory() -> list[str]:
    """Mappings of memory that this process shares through a file without a name."""
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if "/memfd:" in line]


@pytest.mark.parametrize("with_tls", [False, True])
@pytest.mark.parametrize(("transport", "made_of"), [("auto", "shm"), ("tcp", "tcp")])
def test_links_inside_a_host_share_memory_unless_told_otherwise_and_leave_nothing(
    transport: str, made_of: str, with_tls: bool, tmp_path: Path
) -> None:
    tls = Authority(tmp_path).certify("all", "127.0.0.1").files() if with_tls else None
    elements, addresses = 1 << 20, free_addresses(2)
    mapped, opened = shared_memory(), descriptors()

    def train() -> None:
        weights = np.zeros(elements, np.float32)
        servers = [server(addresses, it, 1, tls=tls, transport=transport) for it in range(2)]
        with serving(servers):
            worker = client(addresses, 0, elements=elements, tls=tls, transport=transport)
            for version in range(1, 4):
                assert pulled(worker, weights) == version
                assert weights[0] == weights[-1] == INITIAL - (version - 1)
                worker.push([gradient(0, elements)], 1.0)
            assert pulled(worker, weights) == 4
            assert worker.stats()["transport"] == made_of
            assert (len(shared_memory()) > len(mapped)) == (made_of == "shm")
            worker.leave()

    train()
    assert shared_memory() == mapped
    # A thread that connects may end a moment later.
    wait_until(lambda: not Counter(descriptors()) - Counter(opened), "all is given back")


def test_a_fork_of_a_killed_worker_does_not_keep_it_alive() -> None:
    addresses = free_addresses(1)
    made = server(addresses, 0, 1, worker_timeout=0.3)
    with serving([made], ends=False) as raised:
        # The fork of this process outlives it, as a loader of data may.
        victim = start(role="forks", addresses=addresses)
        assert victim.stdout is not None
        fork = int(victim.stdout.readline())
        assert made.stats()["connections"] == 1
        victim.kill()
        wait_until(lambda: bool(raised), "the server has noticed")
        os.kill(fork, signal.SIGKILL)
        victim.communicate()
    assert "all workers" in str(raised[0])


def test_a_worker_and_a_server_that_cannot_share_memory_use_tcp_and_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    addresses = free_addresses(1)
    with serving([server(addresses, 0, 1)]):
        worker = start(role="without memory", addresses=addresses)
        said, failed = worker.communicate(timeout=120)
    why = "of the same host: no shared memory from the system: File too large (os error 27)"
    assert said == f"tcp\nworker 0 uses TCP to parameter server 0 {why}\n", failed
    wait_until(lambda: bool(caplog.records), "the server has said so, too")
    assert caplog.messages == [f"parameter server 0 uses TCP to worker 0 {why}"]


def test_a_server_that_cannot_be_reached_is_named() -> None:
    addresses = free_addresses(1)
    with pytest.raises(errors.PeerLostError, match=f"parameter server 0 at {addresses[0]}"):
        client(addresses, 0, timeout=0.5).pull([np.zeros(8, np.float32)])


def test_strangers_ranks_and_second_workers_are_turned_away_by_name(tmp_path: Path) -> None:
    addresses = free_addresses(1)
    made = server(addresses, 0, 1, directory=str(tmp_path))
    weights = np.zeros(8, np.float32)
    with serving([made], ends=False):
        with pytest.raises(errors.AuthenticationError, match=f"server 0 at {addresses[0]}"):
            client(addresses, 0, token=b"other").pull([weights])
        first = client(addresses, 0)
        pulled(first, weights)
        with pytest.raises(errors.ConfigError, match=f"process {os.getpid()} on"):
            client(addresses, 0).pull([weights])
        with pytest.raises(errors.ConfigError, match="another living process"):
            server(free_addresses(1), 0, 2, directory=str(tmp_path))
        with pytest.raises(errors.RendezvousError, match="a parameter server's, not a rank's"):
            gradring.Communicator(
                rank=1, world_size=2, rendezvous=addresses[0], token=b"secret", timeout=20
            )
        child = os.fork()
        if child == 0:  # pragma: no cover
            refused = False
            try:
                first.stats()
            except errors.AbortedError:
                refused = True
            first.close()
            made.close()
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        first.push([gradient(0)], 1.0)
        assert pulled(first, weights) == 2


def test_links_with_certificates_let_nobody_in_without(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    right = authority.certify("all", "127.0.0.1").files()
    stranger = Authority(tmp_path, "other").certify(
        "stranger", "127.0.0.1", trusting=authority.path
    )
    addresses, weights = free_addresses(2), np.zeros(8, np.float32)
    made = [server(addresses, it, 1, token=b"", tls=right, replicas=1) for it in range(2)]
    with serving(made[:1]):
        with serving(made[1:], ends=False):
            for tls in (None, stranger.files()):
                with pytest.raises(errors.GradringError, match=r"parameter server . at 127"):
                    client(addresses, 0, token=b"", tls=tls, timeout=1).pull([weights])
            worker = client(addresses, 0, token=b"", tls=right)
            pulled(worker, weights)
            worker.push([gradient(0)], 1.0)
            assert (pulled(worker, weights), weights[0]) == (2, INITIAL - 1)
        # What the other one has goes over such a link, too.
        with serving([server(addresses, 1, 1, token=b"", tls=right, replicas=1)]):
            worker.push([gradient(0)], 1.0)
            wait_until(lambda: not worker.stats()["unsettled"], "it is applied")
            assert (pulled(worker, weights), weights[0]) == (3, INITIAL - 2)
            worker.leave()


def test_a_server_says_whom_it_has_turned_away_when_nobody_else_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    addresses = free_addresses(1)
    made = server(addresses, 0, 1, timeout=5)
    with serving([made]) as raised, pytest.raises(errors.AuthenticationError):
        client(addresses, 0, token=b"another", timeout=1).pull([np.zeros(8, np.float32)])
    why = "turned away 127.0.0.1: a process and rank 0 have different tokens"
    assert why in caplog.text
    assert isinstance(raised[0], errors.RendezvousError)
    assert why.replace("away ", "away: ") in str(raised[0]), raised


def test_a_server_ends_when_nobody_comes_and_when_all_are_lost() -> None:
    addresses = free_addresses(1)
    with pytest.raises(errors.RendezvousError, match="no worker came"):
        server(addresses, 0, 1, timeout=0.3).serve()
    made = server(addresses, 0, 1, worker_timeout=0.3)
    with serving([made]) as raised:
        lost = client(addresses, 0)
        pulled(lost, np.zeros(8, np.float32))
        lost.close()
    assert isinstance(raised[0], errors.PeerLostError) and "all workers" in str(raised[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aggregate", "0"),
        ("overflow", "spill"),
        ("late", "never"),
        ("backup", "1"),
        ("combine", "max"),
        ("snapshot_every", "0"),
        ("replicas", "1"),
        ("queue", "1"),
        ("index", 1),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_by_name(name: str, value: Any) -> None:
    rules = {"workers": "2", "staleness": "None"}
    values: dict[str, Any] = {"index": 0, "rules": rules}
    (values if name == "index" else rules)[name] = value
    with pytest.raises(errors.ConfigError, match=name):
        ParameterServer(addresses=free_addresses(1), config=DEFAULTS.for_core(), **values)


def test_ctrl_c_ends_a_pull() -> None:
    worker: ParameterClient = client(free_addresses(1), 0)
    timer = threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.pull([np.zeros(8, np.float32)])
    worker.close()
    wait_until(lambda: not timer.is_alive(), "the timer has ended")
