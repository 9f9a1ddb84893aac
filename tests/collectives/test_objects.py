"""Python objects that ranks send one another: JSON that changes nothing, or pickles by choice."""

from __future__ import annotations

import collections
import enum
import math
import os
import pickle
import threading
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import MismatchError
from gradring.testing import run_ranks
from support.pairs import on_threads

PLAIN = {"a": [1, -2.5, None, True, "ü\n\ud800"], "big": 2**70, "": {}, "nested": [[[]]]}


def sent(comm: gradring.Communicator) -> list[Any]:
    root = comm.world_size - 1
    own = {"rank": comm.rank, "text": "x" * (1000 * comm.rank)}
    fractions = comm.all_gather_object(Fraction(comm.rank, 3), pickle=True)
    special = comm.broadcast_object([math.nan, math.inf, -0.0])
    return [
        comm.broadcast_object(PLAIN if comm.rank == root else object(), root),
        comm.all_gather_object(own, name="own")
        == [{"rank": r, "text": "x" * (1000 * r)} for r in range(comm.world_size)],
        fractions == [Fraction(r, 3) for r in range(comm.world_size)],
        comm.broadcast_object({comm.rank: b"\0"}, root, pickle=True),
        math.isnan(special[0]) and special[1:] == [math.inf, 0.0] and 1 / special[1] == 0,
        str(special[2]),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_objects_come_as_they_were(world_size: int) -> None:
    expected = [PLAIN, True, True, {world_size - 1: b"\0"}, True, "-0.0"]
    assert on_threads(world_size, sent) == [expected] * world_size


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((1, 2), r"the object is a tuple"),
        ([{"a": (1,)}], r"the object\[0\]\['a'\] is a tuple"),
        ({1: "a"}, r"the key 1 of the object would become text"),
        ([{None: 1}], r"the key None of the object\[0\] would become text"),
        (b"abc", "bytes is not JSON serializable"),
        ({1, 2}, "set is not JSON serializable"),
        (np.float64(1.5), "the object is a float64"),
        (np.ones(2), "ndarray is not JSON serializable"),
        ([Color.RED], r"the object\[0\] is a Color"),
        (collections.OrderedDict(a=1), "the object is a OrderedDict"),
        (object(), "object is not JSON serializable"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_would_change_is_refused(value: Any, says: str) -> None:
    with gradring.Communicator(rank=0, world_size=1) as comm:
        with pytest.raises(TypeError, match=f"broadcast_object: .*{says}.*; send lists"):
            comm.broadcast_object(value)
        with pytest.raises(TypeError, match=f"all_gather_object: .*{says}.*pickle=True"):
            comm.all_gather_object(value)


class Opaque:
    def __reduce__(self) -> str:
        raise pickle.PicklingError("it is opaque")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 1, "this function cannot be pickled: "),
        (Opaque(), "this Opaque cannot be pickled: it is opaque"),
        (threading.Lock(), "this lock cannot be pickled: cannot pickle"),
        (nested(100_000), "this list cannot be pickled: maximum recursion depth"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_pickled_is_refused(value: Any, says: str) -> None:
    with gradring.Communicator(rank=0, world_size=1) as comm:
        with pytest.raises(TypeError, match=f"broadcast_object: {says}"):
            comm.broadcast_object(value, pickle=True)
        with pytest.raises(TypeError, match=f"all_gather_object: {says}.*; send what pickle"):
            comm.all_gather_object(value, pickle=True)


@pytest.mark.parametrize("depth", [600, 990, 100_000])
def test_what_is_too_deep_is_refused_or_sent(depth: int) -> None:
    """How deep is too deep depends on Python, and on how deep the program itself is."""
    value = nested(depth)
    with gradring.Communicator(rank=0, world_size=1) as comm:
        try:
            assert comm.broadcast_object(value) is value
        except TypeError as error:
            assert "broadcast_object: maximum recursion depth" in str(error)


def test_what_has_no_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with gradring.Communicator(rank=0, world_size=1) as comm:
        with pytest.raises(TypeError, match="Circular reference"):
            comm.all_gather_object(endless)
        with pytest.raises(ValueError, match="broadcast_object: root=1 is not a rank"):
            comm.broadcast_object(1, root=1)


def different_in_pickle() -> str:
    with gradring.init() as comm, pytest.raises(MismatchError) as caught:
        comm.all_gather_object([1], pickle=comm.rank == 1)
    return str(caught.value)


def test_ranks_that_do_not_all_pickle_are_told() -> None:
    for message in run_ranks(different_in_pickle, 2):
        assert "'object/sizes" in message and "'object/pickled/sizes" in message


class Misunderstood:
    """What is pickled well, and unpickled nowhere."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def not_unpickled(comm: gradring.Communicator) -> list[str]:
    with pytest.raises(TypeError) as gathered:
        comm.all_gather_object(Misunderstood(), pickle=True)
    said = [str(gathered.value)]
    if comm.rank == 1:
        comm.broadcast_object(Misunderstood(), root=1, pickle=True)
    else:
        with pytest.raises(TypeError) as sent:
            comm.broadcast_object(None, root=1, pickle=True)
        said.append(str(sent.value))
    comm.barrier()
    return said


def test_what_cannot_be_unpickled_is_told_with_its_rank() -> None:
    (gathered, sent), (other,) = on_threads(2, not_unpickled)
    assert "all_gather_object: the object of rank 1 cannot be unpickled here: Value" in gathered
    assert "all_gather_object: the object of rank 0 cannot be unpickled here: Value" in other
    assert "broadcast_object: the object of rank 1 cannot be unpickled" in sent


#: Of an object; more than the pieces in which one travels.
SIZE = 80 << 20


def most_memory(pickle: bool) -> tuple[float, float]:
    """Of both collectives in a world of two, as a multiple of the object and with it."""
    value = os.urandom(SIZE // 2).hex() if not pickle else os.urandom(SIZE)
    with gradring.init() as comm:
        comm.broadcast_object(None, pickle=pickle)  # it imports what it needs
        tracemalloc.start()
        found = comm.broadcast_object(value if comm.rank == 0 else None, pickle=pickle)
        broadcast = tracemalloc.get_traced_memory()[1] + (comm.rank == 0) * SIZE
        assert len(found) == SIZE
        del found
        tracemalloc.reset_peak()
        gathered = comm.all_gather_object(value, pickle=pickle)
        gather = tracemalloc.get_traced_memory()[1] + SIZE
        assert gathered[comm.rank] is value and list(map(len, gathered)) == [SIZE] * 2
        return broadcast / SIZE, gather / SIZE


@pytest.mark.parametrize("pickle", [True, False])
def test_an_object_is_twice_in_memory_and_of_several_there_is_one_more(pickle: bool) -> None:
    for broadcast, gather in run_ranks(most_memory, 2, pickle):
        assert broadcast < 2.5 and gather < 3.5, (broadcast, gather)
