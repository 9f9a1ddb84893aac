"""Input that is no plain array: it counts as the array that it shows, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradring
from gradring.testing import run_ranks

ROWS, COLUMNS = 4, 2


def contents(rank: int) -> Any:
    """Of a rank; every element differs."""
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 10 * rank


def _unaligned(x: Any) -> Any:
    return np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)


def _read_only(x: Any) -> Any:
    return np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)


#: Ways to show the same contents.
SHOWN: dict[str, Callable[[Any], Any]] = {
    "Fortran order": np.asfortranarray,
    "reversed": lambda x: x[::-1].copy()[::-1],
    "every other": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "not aligned": _unaligned,
    "read-only": _read_only,
    "memoryview": memoryview,
    "list": lambda x: [np.float32(each) for each in x],
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
}
#: What a rank gets, of the contents of all ranks.
EXPECTED: dict[str, Callable[[list[Any], int], Any]] = {
    "reduce": lambda all_, rank: sum(all_) if rank == 1 else None,
    "reduce_scatter": lambda all_, rank: np.array_split(sum(all_), len(all_))[rank],
    "all_gather": lambda all_, _: np.concatenate(all_),
    "gather": lambda all_, rank: np.concatenate(all_) if rank == 1 else None,
    "scatter": lambda all_, rank: np.split(all_[1], len(all_))[rank],
    "all_to_all": lambda all_, rank: np.concatenate([np.split(x, len(all_))[rank] for x in all_]),
}
WITH_ROOT = ("reduce", "gather", "scatter")


def call_all() -> dict[Any, Any]:
    found = {}
    with gradring.init() as comm:
        for shown, show in SHOWN.items():
            for collective in EXPECTED:
                root = {"root": np.uint8(1)} if collective in WITH_ROOT else {}
                x = show(contents(comm.rank))
                at_once = getattr(comm, collective)(x, name="größe\n", **root)
                work = getattr(comm, f"{collective}_async")(x, name="\0", **root)
                found[shown, collective] = at_once, work.wait(), work.wait()
    return found


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(call_all, 2)


@pytest.mark.parametrize("shown", SHOWN)
def test_memory_of_any_kind_counts_as_the_array_that_it_shows(ranks: Any, shown: str) -> None:
    every = [np.asarray(SHOWN[shown](contents(rank))) for rank in range(2)]
    for rank, found in enumerate(ranks):
        for collective, expect in EXPECTED.items():
            expected = expect(every, rank)
            for result in found[shown, collective]:
                if expected is None:
                    assert result is None, collective
                else:
                    assert result.dtype == expected.dtype, collective
                    np.testing.assert_array_equal(result, expected, collective)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (None, "a NoneType is no array; pass one, a number or a list of them"),
        ([None, 1.0], "a list is no array"),
        ([np.ones(2), np.ones(3)], "this list is no array .*inhomogeneous"),
        (np.ones(2, bool), "arrays of bool are not supported"),
        (np.ones(2, ">f4"), "float32 in foreign byte order"),
    ],
)
def test_what_is_no_array_is_refused_by_name(x: Any, says: str) -> None:
    with gradring.Communicator(rank=0, world_size=1) as comm:
        for collective in EXPECTED:
            for form in ("", "_async"):
                with pytest.raises(TypeError, match=says):
                    getattr(comm, collective + form)(x)


def test_what_is_exchanged_does_not_come_where_it_still_is() -> None:
    with gradring.Communicator(rank=0, world_size=1) as comm:
        memory = np.arange(4.0)
        for x, out in ((memory[::-1], memory), (memory[:3], memory[1:])):
            for exchange in (comm.all_to_all, comm.all_to_all_async):
                with pytest.raises(ValueError, match="out and x share memory"):
                    exchange(x, out=out)
        assert memory.tolist() == [0, 1, 2, 3], "it was changed before it was refused"
