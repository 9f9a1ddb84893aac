"""Collectives with a root, memory for results, works of every collective: what they refuse."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import MismatchError
from gradring.testing import run_ranks, simulated_hosts
from support.pairs import Pair, on_threads, with_communicator

NEW_RESULTS = ["reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"]
ROOTED = ["reduce", "gather", "scatter", "broadcast"]


def reduced_alike(comm: gradring.Communicator) -> list[str]:
    """Cases in which a reduce has other bits than an all-reduce."""
    wrong = []
    for count in (1, 100, 5000, 70_000, 700_000):
        for root in range(comm.world_size):
            x = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
            reduced = comm.reduce(x, root=root, op="mean")
            everywhere = comm.all_reduce(x, op="mean")
            if comm.rank == root:
                assert reduced is not None
                if reduced.tobytes() != everywhere.tobytes():
                    wrong.append(f"{count} elements, root {root}")
            elif reduced is not None:
                wrong.append("a rank that is not the root got something")
    return wrong


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": "ring"},
        {"algorithm": "one_shot"},
        {"reproducible": True},
        {"wire_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_reduce_has_the_bits_of_an_all_reduce(settings: dict[str, Any]) -> None:
    assert on_threads(4, reduced_alike, **settings) == [[]] * 4


def test_a_reduce_has_the_bits_of_an_all_reduce_on_several_hosts() -> None:
    with simulated_hosts(2) as hosts:
        assert run_ranks(with_communicator, 3, reduced_alike, hosts=hosts) == [[]] * 3


def different(comm: gradring.Communicator, what: str) -> str:
    """Rank 1 calls it with another root, op or shape."""
    other = comm.rank == 1
    name, _, difference = what.partition(" ")
    arguments: dict[str, Any] = {"root": 0} if name in ROOTED else {}
    x: Any = np.ones(6)
    if difference == "root":
        arguments["root"] = int(other)
    elif difference == "op":
        arguments["op"] = "max" if other else "sum"
    elif difference == "shape":
        x = np.ones(9 if other else 6)
    elif difference == "form":
        x = x.reshape((3, 2) if other else (6, 1))
    with pytest.raises(MismatchError) as caught:
        getattr(comm, name)(x, **arguments)
        comm.barrier()  # where a rank is told that had done its part
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("reduce root", ["reduce(sum, root=0)", "reduce(sum, root=1)"]),
        ("reduce op", ["reduce(sum, root=0)", "reduce(max, root=0)"]),
        ("reduce shape", ["float64[6]", "float64[9]"]),
        ("gather root", ["gather(root=0)", "gather(root=1)"]),
        ("gather shape", ["gather(root=0) float64[6]", "gather(root=0) float64[9]"]),
        ("gather form", ["float64[6,1]", "float64[3,2]"]),
        ("scatter root", ["scatter(root=0)", "scatter(root=1)"]),
        ("scatter shape", ["scatter(root=0) float64[6]", "scatter(root=0) float64[9]"]),
        ("reduce_scatter op", ["reduce_scatter(sum)", "reduce_scatter(max)"]),
        ("reduce_scatter shape", ["float64[6]", "float64[9]"]),
        ("all_to_all shape", ["all_to_all float64[6]", "all_to_all float64[9]"]),
        ("broadcast root", ["broadcast(root=0)", "broadcast(root=1)"]),
    ],
)
def test_ranks_that_differ_in_a_call_are_told_on_every_rank(what: str, calls: list[str]) -> None:
    for message in on_threads(3, partial(different, what=what)):
        assert all(call in message for call in calls), message


def _arguments(name: str, **more: Any) -> dict[str, Any]:
    return {"root": 0, **more} if name in ROOTED else more


@pytest.mark.parametrize("name", NEW_RESULTS)
def test_memory_that_the_result_does_not_fit_into_is_refused(name: str) -> None:
    with gradring.Communicator(rank=0, world_size=1) as comm:
        x = np.arange(6.0).reshape(3, 2)
        read_only = np.empty((3, 2))
        read_only.flags.writeable = False
        wrong: list[tuple[Any, type[Exception], str]] = [
            (np.empty((2, 3)), ValueError, "shape"),
            (np.empty(6), ValueError, "shape"),
            (np.empty((4, 2)), ValueError, "shape"),
            (np.empty((3, 2), np.float32), TypeError, "float32"),
            (np.empty((3, 4))[:, ::2], ValueError, "not C-contiguous"),
            (read_only, ValueError, "read-only"),
            ([0.0] * 6, TypeError, "is a list"),
            (np.ma.ones((3, 2)), TypeError, "MaskedArray"),
        ]
        for collective in (getattr(comm, name), getattr(comm, f"{name}_async")):
            for out, error, says in wrong:
                with pytest.raises(error, match=rf"{name}: out .*{says}"):
                    collective(x, **_arguments(name, out=out))
        out = np.empty((3, 2))
        assert getattr(comm, name)(x, **_arguments(name, out=out)) is out
        assert out.tolist() == x.tolist()


@pytest.mark.parametrize("name", ROOTED)
def test_a_root_that_is_no_rank_is_refused(name: str) -> None:
    with gradring.Communicator(rank=0, world_size=1) as comm:
        wrong: list[Any] = [1, -1, 2**70, None, 0.0, "0", np.zeros(2, int), np.array(0.0)]
        for root in (*wrong, np.array([0]), np.bool_(False)):
            of = re.escape(f"{name}: root={root!r}")
            says = f"{of} is not a rank of a world of 1; choose one from 0 to 0"
            for collective in (getattr(comm, name), getattr(comm, f"{name}_async")):
                with pytest.raises(ValueError, match=says):
                    collective(np.ones(2), root=root)
        with pytest.raises(ValueError, match="is not a rank of a world of 1"):
            comm.broadcast_object({}, root=1)


def shorter_memory(comm: gradring.Communicator) -> list[Any]:
    """Only rank 1 has memory for fewer rows than there are."""
    x = np.full((2, 2), comm.rank)
    out = np.empty((4 - comm.rank, 2), x.dtype)
    said = ""
    try:
        comm.all_gather(x, out=out)
    except ValueError as error:
        said = str(error)
    return [said, comm.all_reduce(1)]


def test_memory_for_another_number_of_rows_stops_nobody_else() -> None:
    says = "all_gather: out has shape (3, 2), and the result (4, 2)"
    assert on_threads(2, shorter_memory) == [["", 2], [says, 2]]


def parts_without_input(comm: gradring.Communicator) -> list[Any]:
    out = np.empty((2, 2), np.int32)
    x = np.arange(4 * comm.world_size, dtype=np.int32).reshape(-1, 2)
    if comm.rank != 1:
        with pytest.raises(TypeError, match="scatter: out is a list; pass a plain numpy array"):
            comm.scatter(None, root=1, out=out.tolist())  # type: ignore[call-overload]
    part = comm.scatter(x if comm.rank == 1 else None, root=1, out=out)
    return [part is out, out.tolist()]


def test_a_rank_that_is_not_the_root_needs_no_input_to_get_its_part() -> None:
    rows = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert on_threads(3, parts_without_input) == [[True, part] for part in rows]


def into_its_own_input(comm: gradring.Communicator) -> Any:
    own = np.array([1.0, 2.0])
    total = comm.reduce(own, out=own)
    return total is own, own.tolist() if total is own else total


def test_a_reduction_may_go_into_its_own_input() -> None:
    assert on_threads(2, into_its_own_input) == [(True, [2, 4]), (False, None)]


def into_parts_of_the_input(comm: gradring.Communicator) -> list[Any]:
    """The root's part goes where another's was, or, not quite, where its own was."""
    parts = []
    for start in (0, 1, 2, 3):
        x = np.arange(6.0)
        parts.append(comm.scatter(x, root=1, out=x[start : start + 2]).tolist())
    x = np.arange(6.0)
    parts.append(comm.scatter_async(x, root=1, out=x[:2]).wait(timeout=60.0).tolist())
    return parts


def test_a_part_may_go_where_the_input_is() -> None:
    parts = on_threads(3, into_parts_of_the_input)
    assert parts == [[part] * 5 for part in ([0, 1], [2, 3], [4, 5])]


def works_in_order(comm: gradring.Communicator) -> list[Any]:
    x = np.full(2, comm.rank + 1.0)
    works: list[Any] = [
        comm.reduce_async(x.copy(), root=1),
        comm.all_gather_async(x),
        comm.barrier_async(),
        comm.gather_async(x.copy(), root=1),
        comm.broadcast_async(x.copy(), root=1),
        comm.scatter_async(x.copy(), root=1),
        comm.all_to_all_async(x.copy()),
        comm.reduce_scatter_async(x, "max"),
    ]
    results = [work.wait(timeout=60.0) for work in works]
    return [None if result is None else result.tolist() for result in results]


def test_works_of_every_collective_give_what_the_collective_does() -> None:
    of_all = [1, 1, 2, 2]
    assert on_threads(2, works_in_order) == [
        [None, of_all, None, None, [2, 2], [2], [1, 2], [2]],
        [[3, 3], of_all, None, of_all, [2, 2], [2], [1, 2], [2]],
    ]


#: How many elements go in where four come out, on rank 0 of two.
ELEMENTS = {
    "reduce": 4,
    "reduce_scatter": 8,
    "all_gather": 2,
    "gather": 2,
    "scatter": 8,
    "all_to_all": 4,
}


@pytest.mark.parametrize("ending", ["", "_async"])
@pytest.mark.parametrize("name", NEW_RESULTS)
def test_memory_of_a_work_under_way_takes_no_other_result(name: str, ending: str) -> None:
    with Pair() as pair:
        busy = np.ones(4)
        work = pair.comm.all_reduce_async(busy)
        with pytest.raises(ValueError, match="shares memory with one of an asynchronous"):
            getattr(pair.comm, name + ending)(np.full(ELEMENTS[name], 7.0), out=busy)
        # Nothing was written there, and no other rank waits for what was refused.
        assert pair.peer.all_reduce(np.ones(4)).tolist() == work.wait().tolist() == [2] * 4
