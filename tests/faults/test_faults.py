"""Survivors of a failing rank see the right error, naming the right rank, in bounded time."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from faults.actor import belongings, leaks
from gradring import errors
from gradring.testing import Outcome, run_ranks
from support.chosen import marked_rows
from support.rank_states import rank_0_waits, wait_until_all_others_wait
from support.waiting import meet, wait_until

# Wide: a killed rank is noticed in milliseconds, a stopped one after ten seconds.
DEADLINE_S = 60
# What ranks on a busy machine need at most to find each other.
START_S = STALL_S = 5.0


#: Elements, ranks and transport; the matrix has kills in every phase, over both transports.
KILLS = [(n, ranks, over) for over in ("tcp", "shm") for n in (10, 5_000_000) for ranks in (2, 4)]
QUICK_KILLS = [(5_000_000, 2, "tcp"), (10, 4, "shm")]
#: One over each transport.
QUICK_CLOSED = [(1, "shm"), (2, "tcp")]
#: What rank 1 calls by itself: the collective, elements of a type, other arguments; and its name.
DIFFERENCES: list[tuple[Any, str]] = [
    (("all_reduce", 102, "float32", {}), "all_reduce(sum) 'dense/kernel' float32[102]"),
    (("all_reduce", 98, "float64", {}), "all_reduce(sum) 'dense/kernel' float64[98]"),
    (("all_reduce", 98, "float32", {"op": "max"}), "all_reduce(max) 'dense/kernel' float32[98]"),
    (
        ("all_reduce", 98, "float32", {"name": "dense/bias"}),
        "all_reduce(sum) 'dense/bias' float32[98]",
    ),
    (("broadcast", 98, "float32", {}), "broadcast(root=0) 'dense/kernel' float32[98]"),
]


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test over each transport."""
    monkeypatch.setenv("GRADRING_TRANSPORT", request.param)


def survivors(
    fn: Callable[..., Any], faulty: int, world_size: int, *args: Any, **options: Any
) -> list[errors.GradringError]:
    """Runs ``fn`` and returns the exceptions of all ranks but the faulty one."""
    options = {"timeout": DEADLINE_S, **options}
    outcomes: list[Outcome] = run_ranks(fn, world_size, *args, **options, check=False)
    exceptions = []
    for outcome in outcomes:
        if outcome.rank != faulty:
            assert isinstance(outcome.exception, errors.GradringError), outcome
            exceptions.append(outcome.exception)
    return exceptions


def assert_lost(found: list[errors.GradringError], rank: int) -> None:
    """All say that this rank is lost."""
    for error in found:
        assert isinstance(error, errors.PeerLostError), error
        assert error.rank == rank


def reduce_until_killed(faulty: int, elements: int) -> None:
    with gradring.init() as comm:
        x = np.ones(elements, np.float32)
        for step in range(1_000_000):
            if comm.rank == faulty and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(x, op="mean", name="w")


@pytest.mark.parametrize(
    ("elements", "world_size", "transport"),
    marked_rows(KILLS, QUICK_KILLS),
    indirect=["transport"],
)
@pytest.mark.usefixtures("transport")
def test_a_killed_rank_is_named_on_every_survivor(world_size: int, elements: int) -> None:
    faulty = world_size - 1
    found = survivors(reduce_until_killed, faulty, world_size, faulty, elements)
    assert_lost(found, faulty)
    for error in found:
        assert isinstance(error, ConnectionError)
        assert error.host
        assert f"{error.problem}; {error.advice}" == str(error)
        assert error.advice.startswith("look at that rank's own output")
        assert error.collective == f"all_reduce(mean) 'w' float32[{elements}]"
        assert error.sequence is not None
        assert error.elapsed_s is not None


def call_differently(faulty: int, call: tuple[str, int, str, dict[str, str]]) -> None:
    with gradring.init() as comm:
        comm.all_reduce(np.ones(4, np.float32), name="before")
        if comm.rank == faulty:
            # A majority needs both others.
            wait_until_all_others_wait(comm.rank, "all_reduce")
        else:
            call = ("all_reduce", 98, "float32", {})
        collective, elements, dtype, others = call
        arguments = {"name": "dense/kernel", **others}
        getattr(comm, collective)(np.ones(elements, dtype), **arguments)


@pytest.mark.parametrize(("call", "theirs"), marked_rows(DIFFERENCES, DIFFERENCES[-1:]))
def test_a_different_call_on_one_rank_is_a_mismatch_on_all(call: Any, theirs: str) -> None:
    for outcome in run_ranks(call_differently, 3, 1, call, timeout=DEADLINE_S, check=False):
        error = outcome.exception
        assert isinstance(error, errors.MismatchError), outcome
        assert isinstance(error, ValueError)
        assert error.rank == 1
        assert error.sequence == 2
        assert theirs in str(error)
        assert "all_reduce(sum) 'dense/kernel' float32[98] (ranks 0 and 2)" in str(error)


def raise_an_exception(faulty: int, closes: bool) -> None:
    comm = gradring.init()
    context: Any = comm if closes else contextlib.nullcontext()
    with context:
        if comm.rank == faulty:
            raise RuntimeError("the data set is gone")
        comm.all_reduce(np.ones(3))


@pytest.mark.parametrize("closes", [True, False])
def test_an_exception_on_one_rank_tells_the_others_its_reason(closes: bool) -> None:
    for error in survivors(raise_an_exception, 2, 3, 2, closes):
        assert isinstance(error, errors.AbortedError)
        assert error.rank == 2
        assert "RuntimeError: the data set is gone" in str(error)


def close_and_stay(faulty: int, directory: Path) -> None:
    """The faulty rank's process ends only when all others have got their errors."""
    rank = os.environ["GRADRING_RANK"]
    try:
        # A slow rank may learn of the end while it still connects.
        comm = gradring.init()
        if comm.rank == faulty:
            comm.close()
            while len(list(directory.iterdir())) < comm.world_size - 1:
                time.sleep(0.05)
            return
        comm.all_reduce(np.ones(3))
    finally:
        directory.joinpath(rank).touch()


def test_a_rank_that_closes_is_named_though_its_process_lives_on(tmp_path: Path) -> None:
    for error in survivors(close_and_stay, 1, 3, 1, tmp_path):
        assert isinstance(error, errors.PeerLostError)
        assert error.rank == 1
        assert "closed its communicator" in str(error)
        assert "that rank ended well, " in str(error)
        assert "call evaluate() and the like on all ranks" in str(error)
        assert "gradring.tensorflow.join(batches)" in str(error)


def keep_what_is_closed() -> list[str]:
    """TensorFlow keeps every function that was ever traced, and so the communicator in it."""
    before = belongings()
    kept = []
    for _ in range(2):
        with gradring.init() as comm:
            comm.all_reduce(np.ones(3))
        kept.append(comm)
    assert all(comm.stats()["time_s"] >= 0 for comm in kept)
    return leaks(before)


@pytest.mark.parametrize(
    ("world_size", "transport"),
    marked_rows(itertools.product((1, 2), ("tcp", "shm")), QUICK_CLOSED),
    indirect=["transport"],
)
@pytest.mark.usefixtures("transport")
def test_a_closed_communicator_that_somebody_keeps_holds_nothing(world_size: int) -> None:
    assert run_ranks(keep_what_is_closed, world_size) == [[]] * world_size


def stay_away(faulty: int, place: Path) -> None:
    rank = int(os.environ["GRADRING_RANK"])
    meet(place, 3)
    if rank != faulty:
        gradring.init(timeout=START_S)


@pytest.mark.parametrize(
    "faulty", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_missing_rank_is_named_by_all_who_came(faulty: int, tmp_path: Path) -> None:
    for error in survivors(stay_away, faulty, 3, faulty, tmp_path):
        assert isinstance(error, errors.RendezvousError)
        assert error.rank == faulty
        assert "127.0.0.1" in str(error)


def survive_an_abort() -> list[str]:
    """Every pending work fails with the one cause; the process goes on."""
    comm = gradring.init()
    x = [np.ones(10) for _ in range(5)]
    if comm.rank == 0:
        works = [comm.all_reduce_async(part) for part in x]
        messages = []
        for work in works:
            try:
                work.wait()
            except errors.AbortedError as error:
                messages.append(f"{error.rank} {'disk' in str(error)}")
        return messages
    wait_until(rank_0_waits, "rank 0 waits for its sums")
    comm.abort("the disk is full")
    return []


def test_an_abort_fails_every_pending_work_with_its_reason() -> None:
    assert run_ranks(survive_an_abort, 2)[0] == ["1 True"] * 5
