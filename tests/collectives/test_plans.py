"""All-reduces that are prepared once and called often."""

from __future__ import annotations

import array
import copy
import gc
import operator
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import AbortedError, MismatchError
from gradring.group.communicator import continue_as
from support.pairs import Pair, on_threads


def called_often(comm: gradring.Communicator) -> list[Any]:
    x = np.zeros(3, np.float32)
    bucket = [np.zeros((2, 2)), np.zeros(0), np.zeros(1)]
    plain, mean = comm.prepare(x), comm.prepare(bucket, op="mean", name="gradients")
    results = []
    for step in range(4):
        x[:] = comm.rank + step
        bucket[0][:] = comm.rank
        bucket[2][:] = step
        assert plain() is x and mean() is bucket
        results.append((x.tolist(), bucket[0].tolist(), bucket[2].tolist()))
    work = plain.start()
    assert work.wait() is x
    return results


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_plan_reduces_what_its_arrays_hold_at_each_call(transport: str) -> None:
    means = [[0.5, 0.5], [0.5, 0.5]]
    expected = [([1.0 + 2 * step] * 3, means, [float(step)]) for step in range(4)]
    assert on_threads(2, called_often, transport=transport) == [expected] * 2


def test_plans_take_turns_with_each_other_and_with_all_reduce() -> None:
    """More plans than the engine remembers calls, and the same calls without a plan."""

    def run(comm: gradring.Communicator) -> list[float]:
        arrays = [np.zeros(count) for count in range(1, 9)]
        plans = [comm.prepare(x, "max", name=f"number {n}") for n, x in enumerate(arrays)]
        sums = []
        for step in range(3):
            for n, (x, plan) in enumerate(zip(arrays, plans, strict=True)):
                x[:] = 10 * step + n + comm.rank
                if (step + n + comm.rank) % 3:
                    plan()
                else:
                    comm.all_reduce(x, "max", name=f"number {n}")
                sums.append(float(x.sum()))
        return sums

    expected = [(10.0 * step + n + 1) * (n + 1) for step in range(3) for n in range(8)]
    assert on_threads(2, run) == [expected] * 2


def test_a_plan_of_one_rank_and_of_other_buffers() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        for x in (array.array("f", [1.5]), bytearray(3), np.array(2.5), (np.ones(1), np.ones(2))):
            plan = comm.prepare(x)
            assert plan() is x and plan.start().wait() is x


def shrink(x: np.ndarray[Any, Any]) -> None:
    x.resize(2, refcheck=False)


def protect(x: np.ndarray[Any, Any]) -> None:
    x.flags.writeable = False


def reinterpret(x: np.ndarray[Any, Any]) -> None:
    x.dtype = np.dtype(np.int32)  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("change", [shrink, protect, reinterpret])
def test_an_array_that_changed_in_place_is_refused(
    change: Callable[[np.ndarray[Any, Any]], None],
) -> None:
    with Pair() as pair:
        x = np.ones(4, np.float32)
        plan = pair.comm.prepare(x)
        change(x)
        for call in (plan, plan.start):
            with pytest.raises(
                ValueError, match=r"has changed its memory, shape.*prepare\(\) again"
            ):
                call()
        # Nothing was sent.
        work = pair.comm.all_reduce_async(y := np.ones(1))
        pair.peer.all_reduce(np.ones(1))
        work.wait()
        assert y.tolist() == [2.0]


def test_a_list_whose_arrays_were_replaced_is_refused() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        bucket = [np.ones(1), np.ones(2)]
        plan = comm.prepare(bucket)
        plan()
        others = [np.ones(1), np.ones(2)]
        for change in (
            partial(bucket.append, np.ones(1)),
            partial(operator.setitem, bucket, slice(None), others),
        ):
            change()
            with pytest.raises(ValueError, match="replaced in its list"):
                plan()


class Lender:
    """Lends the memory of an array by DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_another_librarys_array_that_moved_is_refused() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        lender = Lender(np.ones(3))
        plan = comm.prepare(lender)
        assert plan() is lender
        lender.array = np.ones(3)
        with pytest.raises(ValueError, match="has changed its memory"):
            plan()


def test_what_cannot_be_reduced_in_place_cannot_be_prepared() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        x = np.ones(4)
        for wrong in (1.5, "text", None, np.ones(1, np.complex64), np.ma.masked_equal(x, 1.0)):
            with pytest.raises(TypeError):
                comm.prepare(wrong)
        for overlapping in ([x, x], [x[:3], x[2:]], x[::2]):
            with pytest.raises(ValueError):
                comm.prepare(overlapping)
        with pytest.raises(ValueError, match="is none of sum"):
            comm.prepare(x, op="avg")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copy.copy(comm.prepare(x))


def test_memory_of_a_work_is_refused_until_it_has_ended() -> None:
    with Pair() as pair:
        x, y = np.ones(2), np.ones(2)
        plan = pair.comm.prepare(x)
        work = plan.start()
        for call in (plan, plan.start, lambda: pair.comm.all_reduce(x)):
            with pytest.raises(ValueError, match="under way"):
                call()
        pair.peer.prepare(y)()
        assert work.wait().tolist() == y.tolist() == [2.0, 2.0]
        assert not work.done() or plan.start() is not None
        pair.peer.all_reduce(y)


def test_a_work_keeps_the_arrays_of_a_list() -> None:
    with Pair() as pair:
        bucket = [np.full(1000, 1.0)]
        work = pair.comm.prepare(bucket).start()
        kept = bucket.pop()
        address = kept.ctypes.data
        del kept
        assert np.zeros(1000).ctypes.data != address
        pair.peer.all_reduce(np.ones(1000))
        work.wait()


def test_a_plan_that_differs_is_an_error_on_every_rank() -> None:
    with Pair() as pair:
        work = pair.comm.prepare(np.ones(2), name="x").start()
        with pytest.raises(MismatchError):
            pair.peer.prepare(np.ones(3), name="x")()
        with pytest.raises(MismatchError):
            work.wait()


def test_a_plan_of_a_closed_group_says_so() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        plan = comm.prepare(np.ones(1))
    for call in (plan, plan.start):
        with pytest.raises(AbortedError, match="closed"):
            call()


class Items(list[Any]):
    """A list of a class of its own, as TensorFlow wraps those of modules."""


@pytest.mark.parametrize("container", [list, tuple, Items])
def test_all_arrays_of_a_container_are_watched(container: Callable[[Any], Any]) -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        arrays = container([np.ones(1), np.ones(2)])
        plan = comm.prepare(arrays)
        plan()
        if container is not tuple:
            arrays[1] = np.ones(2)
        else:
            arrays[1].shape = (2, 1)
        with pytest.raises(ValueError, match="has changed its memory, shape"):
            plan()


def test_a_dtype_at_the_address_of_a_freed_one_is_no_old_dtype() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        x = np.ones(4, np.dtype(np.float32, metadata={"of": "floats"}))
        plan, address = comm.prepare(x), id(x.dtype)
        reinterpret(x)
        others = [np.dtype(np.int32, metadata={"of": "integers"}) for _ in range(1000)]
        assert address not in map(id, others)
        with pytest.raises(ValueError, match="dtype"):
            plan()


def test_a_plan_keeps_its_communicator_open_and_goes_with_it() -> None:
    with Pair() as pair:
        x, plans = np.ones(1), []
        for comm in (pair.comm, pair.peer):
            plans.append(comm.prepare(np.ones(1)))
        work = plans[0].start()
        plans[1]()
        work.wait()
        # A plan that belongs to its own array can be collected.
        owner = Lender(x)
        owner.plan = pair.comm.prepare(owner)  # type: ignore[attr-defined]
        alive = weakref.ref(owner)
        del owner
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_plan_in_a_fork_is_refused_and_the_group_goes_on(transport: str) -> None:
    with Pair(transport=transport) as pair:
        x, y = np.full(1, 1.0), np.full(1, 2.0)
        plans = pair.comm.prepare(x), pair.peer.prepare(y)
        child = os.fork()
        if not child:
            found = 0
            x[:] = y[:] = 1000.0
            for call in (plans[0], plans[1].start, lambda: pair.comm.prepare(x)):
                try:
                    call()
                except gradring.GradringError as error:
                    found += "process" in str(error)
            os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        work = plans[0].start()
        plans[1]()
        work.wait()
        assert x.tolist() == y.tolist() == [3.0]


def test_only_a_communicator_makes_plans() -> None:
    for wrong in (None, object(), "comm"):
        with pytest.raises(TypeError, match=r"Communicator\.prepare makes plans"):
            gradring.Plan(wrong, np.ones(1), "sum", "")


def test_a_plan_goes_on_in_a_group_that_has_formed_again() -> None:
    x = np.ones(2)
    with gradring.Communicator(0, 1, "127.0.0.1:0") as comm:
        plan = comm.prepare(x)
        again = gradring.Communicator(0, 1, "127.0.0.1:0")
        comm._native.close()
        with pytest.raises(AbortedError, match="closed"):
            plan()
        continue_as(comm, again._native, "")
        assert plan() is x and plan.start().wait() is x
