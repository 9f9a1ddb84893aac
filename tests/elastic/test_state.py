"""Commits, and how ranks come to have the newest one."""

import collections
import copy
import itertools
import os
import re
import signal
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradring
from gradring.elastic import State
from gradring.elastic import commit as commits
from gradring.errors import GradringError, MismatchError, ProtocolError
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.pairs import on_threads

#: The 80 kB of weights travel in 81 pieces.
PIECES_BEFORE_THE_LOSS = 40

VALUES: dict[str, Any] = {
    "weights": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3)),
    "scalar": np.float64(0.1),
    "flags": np.array([True, False]),
    "names": np.array(["a", "bcd"]),
    "bytes": np.array([b"ab\0c"], "V4"),
    "step": 3,
    "nested": {"rate": 0.1, "seen": [1, 2, None], "text": "é"},
}


def same(these: dict[str, Any], those: dict[str, Any]) -> bool:
    return these.keys() == those.keys() and all(
        np.array_equal(np.asarray(this), np.asarray(those[name]))
        and np.asarray(this).dtype == np.asarray(those[name]).dtype
        for name, this in these.items()
    )


def test_restoring_gives_back_the_last_commit_and_no_part_of_what_came_after() -> None:
    state = State(**copy.deepcopy(VALUES))
    state.step = 4
    state.commit()
    state.weights[0] = -1.0
    state.nested["rate"] = 7.0
    state.half = np.zeros(9)
    state.step += 1
    state.restore()
    assert state.step == 4
    state.step = 3
    assert same(state._values(), VALUES)


class Quantity(np.ndarray[Any, Any]):
    """An array of astropy or unyt."""

    unit = "km"


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.array([object()]),
        {1j},
        np.zeros(2, "i4,f8"),
        # JSON would give back another value.
        (1, 2),
        {"seen": {1: 2}},
        collections.defaultdict(int),
        {"seen": collections.Counter("aab")},
        np.ma.array([1, 2], mask=[True, False]),
        np.ones(2).view(Quantity),
    ],
)
def test_what_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"State cannot keep .*'value'"):
        State(value=value)


def test_an_attribute_that_would_be_lost_is_refused() -> None:
    state = State(step=0)
    with pytest.raises(AttributeError, match="keeps step, and would lose 'epoch'"):
        state.epoch = 1


def synced() -> Any:
    """Rank 1 has made two commits, rank 0 one, and rank 2 is new."""
    with gradring.init() as comm:
        commits.PIECE_BYTES = 100
        state = State(weights=np.full(1000, float(comm.rank)), step=comm.rank)
        for number in range((1, 2, 0)[comm.rank]):
            state.step = 10 * comm.rank + number
            state.commit()
        state.step = -1
        state.sync(comm)
        first = state.step, state.weights.tolist(), state._commit.number
        state.step += 1
        state.commit()
        before = comm.stats()["bytes_sent"]
        state.sync(comm)  # all have it
        return first, state.step, comm.stats()["bytes_sent"] - before


def test_all_get_the_newest_commit_of_any() -> None:
    for first, step, sent in run_ranks(synced, 3):
        assert first == (11, [1.0] * 1000, 2)
        assert step == 12
        assert sent < 4000


def made_differently(arrays: list[Any]) -> Any:
    with gradring.init() as comm:
        state = State(weights=arrays[comm.rank], step=0)
        with pytest.raises(MismatchError) as caught:
            state.sync(comm)
        assert state.weights is arrays[comm.rank]
        return caught.value.rank, str(caught.value), float(comm.all_reduce(1.0))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (np.zeros((7, 7), np.float64), "float64 (7, 7)"),
        (np.zeros((10, 7), np.float32), "float32 (10, 7)"),
        (np.zeros((10, 4)), "float64 (10, 4)"),
        (np.zeros((1, 7, 7), np.float32), "float32 (1, 7, 7)"),
    ],
    ids=str,
)
def test_ranks_that_have_made_other_arrays_are_all_told(other: Any, says: str) -> None:
    arrays = [np.zeros((7, 7), np.float32), other]
    for rank, text, ranks in run_ranks(made_differently, 2, arrays):
        assert rank == 1 and ranks == 2.0, "the group goes on"
        assert "rank 1 on " in text and f"State.weights={says}, and rank 0 on " in text
        assert "has State.weights=float32 (7, 7);" in text


def grown() -> Any:
    with gradring.init() as comm:
        state = State(losses=np.zeros((0, 2)), best=None)
        if comm.rank == 1:
            state.losses, state.best = np.ones((3, 2)), np.ones(4)
            state.commit()
        state.sync(comm)
        return state.losses.shape, state.best.shape


def test_an_array_that_has_grown_is_that_of_the_same_program() -> None:
    assert run_ranks(grown, 2) == [((3, 2), (4,))] * 2


def broken_transfer(rendezvous: str) -> Any:
    """Rank 0 is killed in the middle of sending; ranks 1 and 2 go on in a group of their own."""
    comm = gradring.init()
    commits.PIECE_BYTES = 1000
    state = State(weights=np.zeros(10_000))
    if comm.rank < 2:
        state.weights = np.arange(10_000.0)
        state.commit()
    pieces = [0]
    real = gradring.Communicator.broadcast

    def broadcast(self: Any, x: Any, root: int = 0, *, name: str = "") -> Any:
        pieces[0] += name == "elastic/piece"
        if comm.rank == 0 and pieces[0] == PIECES_BEFORE_THE_LOSS:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, x, root, name=name)

    gradring.Communicator.broadcast = broadcast  # type: ignore[method-assign]
    with pytest.raises(GradringError):
        state.sync(comm)
    first, pieces[0] = pieces[0], 0
    comm.close()
    rank = comm.rank - 1
    with gradring.init(rank=rank, world_size=2, rendezvous=rendezvous) as survivors:
        state.sync(survivors)
    return state.weights.tolist(), state._commit.number, first, pieces[0]


def test_a_transfer_goes_on_from_another_rank_where_it_was_broken() -> None:
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    killed, *others = run_ranks(broken_transfer, 3, rendezvous, check=False)
    assert killed.exit_code == -signal.SIGKILL
    found = [outcome.value for outcome in others]
    _, _, begun, _ = found[-1]
    assert 1 < begun <= PIECES_BEFORE_THE_LOSS
    for weights, number, _, second in found:
        assert weights == list(range(10_000))
        assert number == 1
        # 81 pieces in all: the payload is a bit longer than the weights. Those that were on their
        # way to the last rank when the source was killed may not have got there.
        assert second == 81 - (begun - 1)


@pytest.mark.parametrize(
    ("changed", "what"),
    [("elastic/piece", r"bytes 100 to 200 of a commit"), ("elastic/hashes", "hashes of a commit")],
)
def test_what_changes_on_its_way_is_never_taken(
    changed: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gradring.Communicator.broadcast
    monkeypatch.setattr(commits, "PIECE_BYTES", 100)
    pieces = itertools.count()

    def broadcast(self: Any, x: Any, root: int = 0, *, name: str = "") -> Any:
        received = real(self, x, root, name=name)
        # The second piece, or all hashes.
        if self.rank == 1 and name == changed and (name != "elastic/piece" or next(pieces) == 1):
            received.reshape(-1).view(np.uint8)[0] ^= 1
        return received

    monkeypatch.setattr(gradring.Communicator, "broadcast", broadcast)

    def fetched(comm: gradring.Communicator) -> tuple[str, float]:
        state = State(weights=np.full(100, float(comm.rank)))
        if comm.rank == 0:
            state.commit()
        with pytest.raises(GradringError) as caught:
            state.sync(comm)
        if comm.rank == 1:
            assert isinstance(caught.value, ProtocolError) and caught.value.rank == 0
            assert str(caught.value).endswith("; use checksum=True")
        return str(caught.value), float(state.weights[0])

    for rank, (said, weight) in enumerate(on_threads(2, fetched)):
        assert re.search(f"{what} changed on their way from rank 0", said)
        assert weight == rank, "it has what it had"
