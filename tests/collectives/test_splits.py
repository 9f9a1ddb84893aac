"""`all_to_all` with splits: only the rows that they name travel, and what ranks say is checked."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import gradring
from gradring import _native
from gradring.errors import (
    CollectiveTimeoutError,
    ConfigError,
    GradringError,
    MismatchError,
    ProtocolError,
)
from gradring.testing import run_ranks
from support.certificates import Authority
from support.chosen import marked
from support.pairs import on_threads, with_communicator

#: How many rows one rank has for another, of so many.
PATTERNS: dict[str, Callable[[int, int, int], int]] = {
    "nothing": lambda sender, to, ranks: 0,
    "uneven": lambda sender, to, ranks: (3 * sender + 5 * to) % 7,
    "all from one": lambda sender, to, ranks: 9 + to if sender == ranks - 1 else 0,
    "all to one": lambda sender, to, ranks: 9 + sender if to == 0 else 0,
    "all to itself": lambda sender, to, ranks: 4 * (sender == to),
    "to the next": lambda sender, to, ranks: 100 * (to == (sender + 1) % ranks),
}
COLUMNS = 5
#: Of int64, by which ranks tell each other how many rows follow.
TOLD_BYTES = 8


def rows_of(sender: int, to: int, count: int) -> NDArray[np.float64]:
    """So many rows that no other pair of ranks has."""
    values = np.arange(count * COLUMNS, dtype=np.float64).reshape(count, COLUMNS)
    return values + 1000 * sender + 100_000 * to


def exchanged(comm: gradring.Communicator) -> list[str]:
    """Every pattern, blocking and not; returns what went wrong on this rank."""
    wrong = []
    rank, ranks = comm.rank, range(comm.world_size)
    for name, pattern in PATTERNS.items():
        splits = [pattern(rank, to, len(ranks)) for to in ranks]
        x = np.concatenate([rows_of(rank, to, splits[to]) for to in ranks])
        came = [pattern(sender, rank, len(ranks)) for sender in ranks]
        expected = np.concatenate([rows_of(sender, rank, came[sender]) for sender in ranks])
        before = sent_bytes(comm)
        results = [
            comm.all_to_all(x, splits, name=name),
            comm.all_to_all_async(x, np.array(splits, np.uint16), name=name).wait(),
        ]
        for received, counts in results:
            same = received.shape == expected.shape and received.tobytes() == expected.tobytes()
            if not same or counts.dtype != np.int64 or counts.tolist() != came:
                wrong.append(f"{name}: {received} {counts}")
        to_others = x.nbytes - splits[rank] * COLUMNS * 8
        on_the_wire = 2 * (to_others + TOLD_BYTES * (len(ranks) - 1))
        if sent_bytes(comm) - before != on_the_wire:
            wrong.append(f"{name}: {sent_bytes(comm) - before} bytes sent, not {on_the_wire}")
    return wrong


def sent_bytes(comm: gradring.Communicator) -> int:
    """Of payload, in every all-to-all so far."""
    of_kinds = comm.stats()["collectives"]
    return of_kinds["all_to_all"]["bytes_sent"] if "all_to_all" in of_kinds else 0


@pytest.mark.parametrize("world_size", range(1, 9))
def test_only_the_rows_that_the_splits_name_travel(world_size: int) -> None:
    assert on_threads(world_size, exchanged) == [[]] * world_size


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_they_do_so_between_processes(transport: str) -> None:
    env = {"GRADRING_TRANSPORT": transport}
    assert run_ranks(with_communicator, 3, exchanged, env=env) == [[]] * 3


@pytest.mark.parametrize("settings", [{"checksum": True}, {"streams": 3}])
def test_they_do_so_over_links_of_every_kind(settings: dict[str, Any]) -> None:
    assert on_threads(2, exchanged, transport="tcp", **settings) == [[]] * 2


def test_they_do_so_through_tls_with_checksums(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).certify("all", "127.0.0.1")
    settings: dict[str, Any] = {"checksum": True, "streams": 2, "tls": certificate.files()}
    assert on_threads(3, exchanged, transport="tcp", **settings) == [[]] * 3


def at_random(comm: gradring.Communicator, seed: int) -> list[str]:
    """Many exchanges of any splits, dtypes and shapes of rows; what went wrong on this rank."""
    random = np.random.default_rng(seed)
    ranks, rank, wrong = comm.world_size, comm.rank, []
    for call in range(40):
        counts = random.integers(0, random.choice([1, 3, 2000]), (ranks, ranks))
        row = tuple(random.integers(0, 4, random.integers(0, 3)))
        dtype = np.dtype(random.choice(["f4", "f8", "f2", "i4", "i8", "u1"]))
        bits = [
            random.bytes(int(n.sum() * np.prod(row, dtype=int) * dtype.itemsize)) for n in counts
        ]
        sent = [
            np.split(np.frombuffer(b, dtype).reshape(n.sum(), *row), np.cumsum(n)[:-1])
            for b, n in zip(bits, counts, strict=True)
        ]
        expected = np.concatenate([of_rank[rank] for of_rank in sent])
        received, told = comm.all_to_all(np.concatenate(sent[rank]), counts[rank].tolist())
        if received.tobytes() != expected.tobytes() or received.shape != expected.shape:
            wrong.append(f"seed {seed}, call {call}: {received}")
        if told.tolist() != counts[:, rank].tolist():
            wrong.append(f"seed {seed}, call {call}: {told}")
    return wrong


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (3, 2), (5, 3)])
def test_any_splits_of_any_rows_arrive_as_they_are(world_size: int, seed: int) -> None:
    assert on_threads(world_size, partial(at_random, seed=seed)) == [[]] * world_size


def test_what_came_goes_back_by_the_splits_that_came_with_it() -> None:
    def there_and_back(comm: gradring.Communicator) -> bool:
        x = np.arange(6.0).reshape(3, 2) + 10 * comm.rank
        splits = [[3, 0, 0], [1, 1, 1], [0, 2, 1]][comm.rank]
        back, returned = comm.all_to_all(*comm.all_to_all(x, splits))
        back_bytes: bytes = back.tobytes()
        return back_bytes == x.tobytes() and returned.tolist() == splits

    assert on_threads(3, there_and_back) == [True] * 3


def with_splits_among_others(comm: gradring.Communicator) -> list[Any]:
    """Works that run in launch order, before and behind it."""
    before = comm.all_reduce_async(np.ones(3), name="before")
    work = comm.all_to_all_async(np.full(2, comm.rank), [1, 1])
    behind = comm.all_reduce_async(np.ones(3), name="behind")
    received, _ = work.wait(timeout=60.0)
    return [before.wait()[0], received.tolist(), behind.wait()[0]]


def test_works_with_splits_run_in_launch_order() -> None:
    assert on_threads(2, with_splits_among_others) == [[2.0, [0, 1], 2.0]] * 2


def test_memory_that_a_work_uses_is_refused_before_the_splits_travel() -> None:
    """Only rank 0 passes it; rank 1 joins the work after that."""
    refused = threading.Event()

    def in_use(comm: gradring.Communicator) -> Any:
        x = np.arange(4.0)
        if comm.rank == 0:
            work = comm.all_reduce_async(x)
            for exchange in (comm.all_to_all, comm.all_to_all_async):
                with pytest.raises(ValueError, match="shares memory with one of an asynchronous"):
                    exchange(x[1:3], [1, 1])
            refused.set()
        else:
            assert refused.wait(60.0)
            work = comm.all_reduce_async(np.ones(4))
        work.wait()
        received, _ = comm.all_to_all(x[1:3], [1, 1])
        return received.tolist()

    assert on_threads(2, in_use) == [[2.0, 1.0], [3.0, 2.0]]


def shown_in_many_ways(comm: gradring.Communicator) -> list[str]:
    """Input that is no plain array, or has no rows or no columns; what went wrong."""
    base = np.arange(12, dtype=np.float32).reshape(4, 3) + 100 * comm.rank
    frozen = base.copy()
    frozen.flags.writeable = False
    shown: dict[str, Any] = {
        "Fortran order": np.asfortranarray(base),
        "every other": np.repeat(base, 2, axis=0)[::2],
        "read-only": frozen,
        "memoryview": memoryview(base.copy()),
        "list": list(base),
        "bfloat16": base.astype(ml_dtypes.bfloat16),
        "no columns": base[:, :0],
        "one number each": base[:, 0],
    }
    wrong = []
    for name, x in shown.items():
        # Of rank 0, one row is for itself and three for the other one; of rank 1, all for rank 0.
        received, told = comm.all_to_all(x, [[1, 3], [4, 0]][comm.rank], name=name)
        plain = np.asarray(x)
        own = plain - plain.dtype.type(100 * comm.rank)
        of_ranks = [own, own + plain.dtype.type(100)]
        expected = [np.concatenate([own[:1], of_ranks[1]]), own[1:]][comm.rank]
        if received.dtype != plain.dtype or received.shape != expected.shape:
            wrong.append(f"{name}: {received.dtype} {received.shape}")
        if received.tobytes() != expected.tobytes() or told.tolist() != [[1, 4], [3, 0]][comm.rank]:
            wrong.append(f"{name}: {received} {told}")
    nothing, told = comm.all_to_all(base[:0], [0, 0])
    if nothing.shape != (0, 3) or told.tolist() != [0, 0]:
        wrong.append("no rows")
    number, told = comm.all_to_all(np.float32(comm.rank), [1 - comm.rank, comm.rank])
    if number.tolist() != [comm.rank] or told.tolist() != [1 - comm.rank, comm.rank]:
        wrong.append(f"a number: {number} {told}")
    return wrong


def test_input_of_any_kind_counts_as_the_array_that_it_shows() -> None:
    assert on_threads(2, shown_in_many_ways) == [[]] * 2


def with_integers_of_many_kinds(comm: gradring.Communicator) -> list[str]:
    """What went wrong with splits that are all 1 and 2."""
    splits: list[Any] = [
        (np.uint64(1), np.int8(2)),
        [np.uint64(1), 2],
        [1, np.uint16(2)],
        np.array([1, 2], ">i8"),
        np.array([1, 0, 2])[::2],
        array("Q", [1, 2]),
    ]
    x = np.arange(3.0) + 10 * comm.rank
    expected = [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]][comm.rank]
    received = [comm.all_to_all(x, each)[0].tolist() for each in splits]
    return [str(splits[i]) for i, got in enumerate(received) if got != expected]


def test_splits_are_integers_of_any_kind() -> None:
    assert on_threads(2, with_integers_of_many_kinds) == [[]] * 2


def in_halves() -> list[Any]:
    """Ranks of two groups of `split`, each with its own splits; then all."""
    with gradring.init() as comm:
        x = np.arange(3.0) + 10 * comm.rank
        half = comm.split(color=comm.rank % 2)
        assert half is not None
        with half:
            received, _ = half.all_to_all(x, [[1, 2], [3, 0]][half.rank])
        whole, _ = comm.all_to_all(x, [3 * (to == 3 - comm.rank) for to in range(4)])
        return [received.tolist(), whole.tolist()]


def test_groups_of_some_ranks_have_splits_of_their_own() -> None:
    assert run_ranks(in_halves, 4) == [
        [[0, 20, 21, 22], [30, 31, 32]],
        [[10, 30, 31, 32], [20, 21, 22]],
        [[1, 2], [10, 11, 12]],
        [[11, 12], [0, 1, 2]],
    ]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([2, 2], ValueError, r"splits=\[2, 2\] add up to 4, and x has 3 rows"),
    ([4, -1], ValueError, r"splits=\[4, -1\] would give a rank less than no rows"),
    ([3], ValueError, r"splits have shape \(1,\); give one for each of 2 ranks"),
    (3, ValueError, r"splits have shape \(\)"),
    ([[1, 2]], ValueError, r"splits have shape \(1, 2\)"),
    ([], ValueError, r"splits have shape \(0,\)"),
    ([1.0, 2.0], TypeError, "splits are of float64; give integers"),
    ([np.uint64(1), 2.0], TypeError, "splits are of float64; give integers"),
    (np.array([1.0, 2.0]), TypeError, "splits are of float64; give integers"),
    ([True, True], TypeError, "splits are of bool; give integers"),
    ([2**62, 2**62], ValueError, "add up to 9223372036854775808, and x has 3 rows"),
    ([2**64, 3], TypeError, "is no array"),
    (np.array([2**64 - 1, 4], np.uint64), ValueError, "add up to 18446744073709551619"),
    (["1", "2"], TypeError, "splits are of <U1"),
    (np.ma.array([1, 2], mask=[True, False]), TypeError, "its mask would be ignored"),
]


def refused_and_then_right(comm: gradring.Communicator) -> list[Any]:
    """Rank 0 passes what makes no sense, catches the error, and passes something better."""
    x = np.arange(3.0) + 10 * comm.rank
    before = sent_bytes(comm)
    for splits, error, says in REFUSED if comm.rank == 0 else ():
        for exchange in (comm.all_to_all, comm.all_to_all_async):
            with pytest.raises(error, match=says):
                exchange(x, splits)
    if comm.rank == 0:
        with pytest.raises(ValueError, match="splits cannot be combined with out"):
            comm.all_to_all(x, [1, 2], out=np.empty(3))  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="arrays of bool are not supported"):
            comm.all_to_all(np.ones(3, bool), [1, 2])
    assert sent_bytes(comm) == before
    received, splits = comm.all_to_all(x, [1, 2])
    return [received.tolist(), splits.tolist()]


def test_what_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    assert on_threads(2, refused_and_then_right) == [
        [[0.0, 10.0], [1, 1]],
        [[1.0, 2.0, 11.0, 12.0], [2, 2]],
    ]


DIFFERENT: dict[str, tuple[Callable[[bool], Any], list[str]]] = {
    "dtype": (
        lambda other: (np.ones((3, 2), np.float32 if other else np.float64), [1, 1, 1]),
        ["all_to_all 'x' rows of float32[2]", "all_to_all 'x' rows of float64[2]"],
    ),
    "shape of a row": (
        lambda other: (np.ones((3, 4) if other else (3, 2, 2)), [1, 1, 1]),
        ["all_to_all 'x' rows of float64[4]", "all_to_all 'x' rows of float64[2,2]"],
    ),
    "no splits": (
        lambda other: (np.ones((3, 2)), None if other else [1, 1, 1]),
        ["all_to_all 'x' float64[3,2]", "all_to_all 'x/splits' int64[3]"],
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_on_every_rank(what: str) -> None:
    arguments, calls = DIFFERENT[what]

    def differ(comm: gradring.Communicator) -> str:
        x, splits = arguments(comm.rank == 1)
        with pytest.raises(MismatchError) as caught:
            comm.all_to_all(x, splits, name="x")
            comm.barrier()  # where a rank is told that had done its part
        assert caught.value.rank == 1
        return str(caught.value)

    for message in on_threads(3, differ):
        assert all(call in message for call in calls), message


def tells(comm: gradring.Communicator, rows: int, name: str = "x") -> tuple[str, int | None, str]:
    """Rank 1 tells rank 0 that it has so many rows, whatever it has."""
    of_splits = f"{name}/splits" if name else "splits"
    try:
        if comm.rank == 1:
            told, came = np.array([rows, 0, 0]), np.zeros(3, np.int64)
            comm._native.run(_native.Collective.all_to_all(), [told, came], of_splits, (3,))
            comm.barrier()
        else:
            splits = [1, 1, 0] if comm.rank == 0 else [0, 1, 1]
            comm.all_to_all(np.ones((2, 3)), splits, name=name)
            comm.barrier()
    except GradringError as error:
        return type(error).__name__, error.rank, str(error)
    return "nothing", None, ""


@pytest.mark.parametrize(
    ("rows", "name", "call"),
    [
        *((rows, "x", "all_to_all 'x'") for rows in (-1, -(2**63), 2**62, 2**59)),
        (-1, "", "all_to_all"),
    ],
)
def test_rows_that_no_rank_can_have_name_their_rank_before_there_is_memory(
    rows: int, name: str, call: str
) -> None:
    says = f"told that it sends {rows} rows in {call}, which no rank can"
    for kind, rank, message in on_threads(3, partial(tells, rows=rows, name=name)):
        assert (kind, rank) == (ProtocolError.__name__, 1), message
        assert says in message


@pytest.mark.parametrize("rows", [2**46, 2**41])
def test_more_rows_than_a_host_has_memory_for_fail_before_there_is_any(rows: int) -> None:
    says = f"no memory for {(rows + 1) * 24} bytes of all_to_all 'x', most of it from rank 1"
    for kind, rank, message in on_threads(3, partial(tells, rows=rows)):
        assert (kind, rank) == (ConfigError.__name__, 0), message
        assert says in message


def sends_less_than_told(comm: gradring.Communicator) -> tuple[str, int | None]:
    """Rank 1 has told rank 0 of three rows, and sends two."""
    try:
        if comm.rank == 1:
            told, came = np.array([3, 0]), np.zeros(2, np.int64)
            comm._native.run(_native.Collective.all_to_all(), [told, came], "splits", (2,))
            other = _native.Collective.all_to_all_v([2, 0], [1, 0])
            comm._native.run(other, [np.ones(2), np.ones(1)], "", ())
        else:
            comm.all_to_all(np.ones(1), [0, 1])
        comm.barrier()
    except GradringError as error:
        return type(error).__name__, error.rank
    return "nothing", None


def test_a_rank_that_sends_other_rows_than_it_has_told_is_named() -> None:
    assert on_threads(2, sends_less_than_told) == [("ProtocolError", 1)] * 2


def does_not_come(comm: gradring.Communicator) -> tuple[str, int | None]:
    try:
        if comm.rank == 0:
            comm.all_to_all_async(np.ones(2), [1, 1])
        else:
            comm.recv(np.ones(1), source=0)
    except CollectiveTimeoutError as error:
        return type(error).__name__, error.rank
    return "nothing", None


def test_a_rank_that_does_not_tell_its_splits_is_waited_for_no_longer_than_any() -> None:
    found = on_threads(2, does_not_come, stall_timeout=1.0)
    assert found == [("CollectiveTimeoutError", 1)] * 2


def all_from_one(size: int) -> list[Any]:
    """Rank 0 has that many bytes and three more for rank 1, and rank 1 has nothing."""
    with gradring.init() as comm:
        count = size + 3 if comm.rank == 0 else 0
        x = np.zeros(count, np.uint8)
        x[::4097] = np.arange(len(x[::4097])) % 251
        received, splits = comm.all_to_all(x, [0, count])
        sent = sent_bytes(comm)
        if comm.rank == 0:
            return [received.size, splits.tolist(), sent - TOLD_BYTES]
        marks = received[::4097]
        right = bool((marks == np.arange(len(marks)) % 251).all())
        right = right and int(np.count_nonzero(received)) == int(np.count_nonzero(marks))
        return [received.size, splits.tolist(), sent - TOLD_BYTES, right]


@pytest.mark.parametrize("size", marked([48 << 20, 2 << 30], [48 << 20]))
def test_one_rank_may_have_everything(size: int) -> None:
    assert run_ranks(all_from_one, 2, size, timeout=240) == [
        [0, [0, 0], size + 3],
        [size + 3, [size + 3, 0], 0, True],
    ]
