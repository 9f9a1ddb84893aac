"""Values that have to be the same on all ranks, and who is told that they are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gradring import Communicator
from gradring.errors import MismatchError
from gradring.group.require_equal import gather_if_different, require_equal
from support.pairs import on_threads


def error_of(compare: Callable[[], object]) -> MismatchError | None:
    try:
        compare()
    except MismatchError as error:
        return error
    return None


def test_all_ranks_are_told_which_rank_differs_in_what_and_the_group_stays_usable() -> None:
    def compared(comm: Communicator) -> tuple[MismatchError | None, int]:
        own = {"same": "1", "x": str(comm.rank == 2)}
        error = error_of(lambda: require_equal(comm, own, remedy="mend it"))
        return error, int(comm.all_reduce(np.ones(1, np.int64))[0])

    for error, count in on_threads(3, compared):
        assert error is not None and error.rank == 2 and count == 3
        assert "rank 2 on" in str(error) and "has x=True, and rank 0 on" in str(error)
        assert str(error).endswith("has x=False; mend it")


def test_only_what_differs_is_gathered_and_lengths_may_differ() -> None:
    def gathered(comm: Communicator) -> tuple[object, object, list[str]]:
        same = gather_if_different(comm, b"same", "same")
        before = list(comm.stats()["collectives"])
        other = gather_if_different(comm, b"x" * comm.rank, "other")
        return same, other, before

    for same, other, launched in on_threads(3, gathered):
        assert same is None and other == [b"", b"x", b"xx"] and launched == ["all_reduce"]


@pytest.mark.parametrize(
    ("standings", "counting"),
    [((2, 2, 2), [0, 1, 2]), ((0, 2, 1), [1]), ((1, 0, 1), [0, 2]), ((1, 1, 1), [0, 1, 2])],
)
def test_the_word_of_those_counts_that_have_the_highest_standing(
    standings: tuple[int, int, int], counting: list[int]
) -> None:
    def compared(comm: Communicator) -> list[int] | str:
        counts = comm.rank in counting
        try:
            return require_equal(comm, {"x": str(counts)}, standing=standings[comm.rank])
        except MismatchError as error:
            return str(error)

    for rank, told in enumerate(on_threads(3, compared)):
        if rank in counting:
            assert told == counting
        else:
            assert f"rank {rank} on" in str(told) and f"and rank {counting[0]} on" in str(told)
