"""Calls whose types checkers must find: `test_types` runs them over this file, nothing runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import gradring
from gradring.tensorflow import GradientReducer
from gradring.updates import Bits16

Float = NDArray[np.float32]
Integer = NDArray[np.int64]


def arrays_keep_their_dtype(comm: gradring.Communicator, x: Float, number: float) -> None:
    """Of what is no array, nobody knows it."""
    assert_type(comm.all_reduce(x), Float)
    assert_type(comm.all_reduce([x, x]), list[Float])
    assert_type(comm.all_reduce(number), float)
    assert_type(comm.all_gather(x), Float)
    assert_type(comm.all_gather(number), NDArray[Any])
    assert_type(comm.all_gather([1, 2]), NDArray[Any])
    assert_type(comm.reduce(x), Float | None)
    assert_type(comm.reduce([1, 2], root=1), NDArray[Any] | None)
    assert_type(comm.reduce_scatter(x, "max", out=x), Float)
    assert_type(comm.gather(x, root=1), Float | None)
    assert_type(comm.scatter(x), Float)
    assert_type(comm.scatter(None, root=1, out=x), NDArray[Any])
    assert_type(comm.all_to_all(x), Float)
    assert_type(comm.all_to_all(x, splits=[1, 2]), tuple[Float, Integer])
    assert_type(comm.all_to_all(x, splits=np.array([1, 2])), tuple[Float, Integer])
    assert_type(comm.all_to_all([1, 2]), NDArray[Any])
    assert_type(comm.broadcast(x), Float)


def works_have_the_type_of_what_they_return(comm: gradring.Communicator, x: Float) -> None:
    """So `wait` has that of the collective itself."""
    assert_type(comm.all_reduce_async(x), gradring.Work[Float])
    assert_type(comm.all_gather_async(x).wait(), Float)
    assert_type(comm.reduce_async(x).wait(), Float | None)
    assert_type(comm.reduce_scatter_async(x).wait(), Float)
    assert_type(comm.gather_async(x).wait(), Float | None)
    assert_type(comm.scatter_async(x).wait(), Float)
    assert_type(comm.all_to_all_async(x).wait(), Float)
    assert_type(comm.all_to_all_async(x, [1, 2]).wait(), tuple[Float, Integer])
    assert_type(comm.barrier_async().wait(), None)
    assert_type(comm.prepare(x), gradring.Plan[Float])
    assert_type(comm.prepare([x, x], "mean", name="x")(), list[Float])
    assert_type(comm.prepare(x).start(), gradring.Work[Float])


def a_group_is_there_where_a_color_is(comm: gradring.Communicator, color: int | None) -> None:
    """With a color that may be None, it may be None."""
    with comm.split(comm.rank // 2) as pair:
        assert_type(pair, gradring.Communicator)
    assert_type(comm.split(None), None)
    assert_type(comm.split(color), gradring.Communicator | None)


def an_op_is_one_of_five(comm: gradring.Communicator, x: Float, op: gradring.ReduceOp) -> None:
    """Each line with a comment is an error, or the comment would be one."""
    comm.all_reduce(x, op)
    GradientReducer(op)
    comm.all_reduce(x, "avg")  # type: ignore[arg-type]
    comm.reduce_scatter(x, op="add")  # type: ignore[call-overload]
    GradientReducer("average")  # type: ignore[arg-type]


def settings_have_types() -> None:
    """Also those of the table."""
    gradring.init(streams=2, checksum=True).close()
    gradring.init(streams="two")  # type: ignore[arg-type]
    gradring.init(stream=2)  # type: ignore[call-arg]
    gradring.init(transport="shm", wire_dtype="float16").close()
    gradring.init(transport="pigeons")  # type: ignore[arg-type]
    gradring.init(wire_dtype="int8")  # type: ignore[arg-type]


def checks_and_dtypes_are_words(comm: gradring.Communicator) -> None:
    """So are the arguments of update rules."""
    GradientReducer(communicator=comm, check_gradients="warn")
    GradientReducer(communicator=comm, check_gradients="ignore")  # type: ignore[arg-type]
    Bits16("float16")
    Bits16("float64")  # type: ignore[arg-type]
