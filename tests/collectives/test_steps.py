"""A rank that leaves a step early, in programs of numpy: named on every rank, and no mixed sums."""

from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import AbortedError, GradringError, MismatchError
from gradring.testing import run_ranks
from support.pairs import Pair

BAD_STEP = 3


def leave(where: str, by: str, expected: bool, all_do: bool = False) -> Any:
    """Rank 1, or all, leave a step of two reductions, catch what they raised, and go on."""
    comm, sums = gradring.init(timeout=20.0), []
    exception: Any = getattr(__builtins__, by, None) or __builtins__[by]  # type: ignore[index]
    try:
        for step in range(1, 6):
            bad = (all_do or comm.rank == 1) and step == BAD_STEP
            try:
                with comm.step(abort_on_exception=not expected):
                    if bad and where == "before":
                        raise exception("a bad batch")
                    sums.append((step, comm.all_reduce(10**step)))
                    if bad and where == "between":
                        raise exception("a bad batch")
                    sums.append((step, comm.all_reduce(10**step)))
            except GradringError:
                raise  # a MismatchError is a ValueError as well
            except exception:
                continue
        return sums, None
    except GradringError as error:
        return sums, error
    finally:
        comm.close()


def unequal_numbers_of_steps() -> Any:
    """Steps without collectives are nobody's business, and steps inside of steps are parts."""
    with gradring.init() as comm:
        for _ in range(3 * comm.rank):
            with comm.step():
                pass
        first = comm.all_reduce(1)
        for step in range(2):
            with comm.step():
                for _ in range(comm.rank + 1):
                    with comm.step():
                        pass
                comm.all_reduce(step)
                with comm.step():
                    comm.all_reduce(step)
        with comm.step():
            pass
        return first, comm.all_reduce(1)


def leaves_the_monitor(where: str) -> Any:
    """Rank 1 leaves a loop with a monitor, and goes on."""
    comm = gradring.init(timeout=20.0)
    try:
        try:
            with gradring.Monitor(comm) as monitor:
                for step in range(4):
                    comm.all_reduce(step)
                    if comm.rank == 1 and step == 2 and where == "in a step":
                        raise ValueError("a bad batch")
                    comm.all_reduce(step)
                    monitor.step()
                    if comm.rank == 1 and step == 2 and where == "between steps":
                        raise ValueError("a bad batch")
        except ValueError:
            pass
        return comm.all_reduce(100, name="evaluation")
    except GradringError as error:
        return error
    finally:
        comm.close()


def assert_not_mixed(sums: Any, ranks: int) -> None:
    assert sums and all(total == ranks * 10**step for step, total in sums), sums


@pytest.mark.parametrize("by", ["ValueError", "KeyError"])
def test_an_exception_after_a_collective_of_a_step_ends_the_group(by: str) -> None:
    for rank, (sums, error) in enumerate(run_ranks(leave, 3, "between", by, False)):
        assert_not_mixed(sums, 3)
        assert isinstance(error, AbortedError), (rank, error)
        assert error.rank == 1 and str(error.host) in str(error)
        assert f"its step {BAD_STEP} was left by {by}: " in str(error)
        assert "a bad batch" in str(error) and "abort_on_exception=False" in str(error)


@pytest.mark.parametrize(
    ("where", "by"),
    [
        ("before", "ValueError"),
        ("between", "StopIteration"),
        ("before", "StopIteration"),
        ("between", "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_goes_on_one_step_apart_is_named(where: str, by: str) -> None:
    for sums, error in run_ranks(leave, 3, where, by, False):
        assert_not_mixed(sums, 3)
        assert isinstance(error, MismatchError)
        assert error.rank == 1
        left = f"in step {BAD_STEP + 1}, after it left step {BAD_STEP} by {by}: a bad batch"
        assert left in str(error)
        assert f"in step {BAD_STEP} (ranks 0 and 2)" in str(error)


def test_a_rank_that_leaves_alone_what_all_were_to_leave_is_named() -> None:
    for sums, error in run_ranks(leave, 2, "between", "ValueError", True):
        assert_not_mixed(sums, 2)
        assert isinstance(error, MismatchError) and error.rank == 1
        assert f"in step {BAD_STEP + 1}; " in str(error) and "in step 3 (rank 0)" in str(error)


@pytest.mark.parametrize(("where", "expected"), [("before", False), ("between", True)])
def test_ranks_that_leave_a_step_alike_go_on(where: str, expected: bool) -> None:
    for sums, error in run_ranks(leave, 2, where, "ValueError", expected, True):
        assert error is None
        assert_not_mixed(sums, 2)
        assert len(sums) == {"before": 8, "between": 9}[where]


def test_steps_without_collectives_do_not_count() -> None:
    assert run_ranks(unequal_numbers_of_steps, 2) == [(2, 2), (2, 2)]


def test_an_exception_that_leaves_a_monitor_in_a_step_ends_the_group() -> None:
    for error in run_ranks(leaves_the_monitor, 2, "in a step"):
        assert isinstance(error, AbortedError) and error.rank == 1
        assert "ValueError: a bad batch after 1 of its collectives" in str(error)
    assert all(
        isinstance(error, MismatchError)
        for error in run_ranks(leaves_the_monitor, 2, "between steps")
    )


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (Wordless(), r"Wordless: <exception str\(\) failed>"),
        (ValueError("no file \udcff"), "ValueError: no file"),
    ],
)
def test_an_exception_without_text_that_can_travel_ends_the_group_too(
    error: Exception, says: str
) -> None:
    for block in ("with", "step"):
        with Pair() as pair:
            with pytest.raises(type(error)):
                if block == "with":
                    with pair.comm:
                        raise error
                with pair.comm.step():
                    pair.comm.all_reduce_async(np.ones(3))
                    raise error
            with pytest.raises(AbortedError, match=says), pair.peer.step():
                pair.peer.all_reduce(np.ones(3))
                pair.peer.barrier()  # the first may have ended before


def repeats() -> Any:
    """Rank 1 reads its batch twice: the first attempt fails, before anything was reduced."""
    with gradring.init() as comm:
        sums = []
        for step in range(1, 4):
            for attempt in range(2):
                try:
                    with comm.step(abort_on_exception=False):
                        if comm.rank == 1 and attempt == 0:
                            raise OSError("the disk is slow")
                        sums.append((step, comm.all_reduce(10**step)))
                        break
                except OSError:
                    continue
        return sums


def test_a_step_that_reduced_nothing_may_be_repeated() -> None:
    for sums in run_ranks(repeats, 2):
        assert_not_mixed(sums, 2)
        assert len(sums) == 3


def test_a_world_of_one_has_nobody_to_be_apart_from() -> None:
    with gradring.Communicator(0, 1) as comm:
        with pytest.raises(ValueError, match="a bad batch"), comm.step():
            comm.all_reduce(1)
            raise ValueError("a bad batch")
        assert comm.all_reduce(2) == 2
