"""Memory that an asynchronous collective writes: no other collective reads it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.elastic import State
from support.pairs import on_threads

READERS = ("reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


def readings(comm: gradring.Communicator, x: Any) -> dict[str, Callable[[], object]]:
    """Each collective that reads ``x``, from each root."""
    calls: dict[str, Callable[[], object]] = {}
    for name in (*READERS, *(f"{name}_async" for name in READERS)):
        call = getattr(comm, name)
        if name.startswith(("reduce_scatter", "all_")):
            calls[name] = partial(call, x)
        else:
            for root in range(comm.world_size):
                calls[f"{name} to {root}"] = partial(call, x, root=root)
    other = 1 - comm.rank
    calls["all_to_all with splits"] = lambda: comm.all_to_all(x, splits=[len(x), 0])
    calls["send"] = lambda: comm.send(x, other)
    calls["send_async"] = lambda: comm.send_async(x, other)
    calls["send of a bucket"] = lambda: comm.send([np.ones(2), x], other)
    return calls


def during_a_receive(memory: np.ndarray[Any, Any], check: Callable[[Any], None]) -> None:
    """Checks on each of two ranks, while each waits for what the other sends into ``memory``."""

    def on_rank(comm: gradring.Communicator) -> None:
        own = memory.copy()
        work = comm.recv_async(own[2], 1 - comm.rank)
        check((comm, own))
        comm.send(np.full_like(own[2], 7), 1 - comm.rank)
        work.wait()
        assert (own[2] == 7).all()
        assert comm.all_gather(own[2:3]).shape == (2, *own.shape[1:]), "it may be read again"

    on_threads(2, on_rank)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda own: own, id="all of it"),
        pytest.param(lambda own: own[2], id="the part"),
        pytest.param(lambda own: own[2, 2:4], id="a part of the part"),
        pytest.param(lambda own: own[::2], id="every second row"),
        pytest.param(lambda own: own[:, 1], id="a column"),
        pytest.param(lambda own: own.T[::-1], id="turned and backwards"),
        pytest.param(lambda own: memoryview(own), id="a buffer"),
        pytest.param(lambda own: np.broadcast_to(own[2, :1], (4, 6)), id="one element many times"),
    ],
)
def test_memory_that_a_work_writes_is_refused_before_anything_travels(
    view: Callable[[Any], Any],
) -> None:
    def check(given: tuple[gradring.Communicator, Any]) -> None:
        comm, own = given
        for name, call in readings(comm, view(own)).items():
            with pytest.raises(ValueError, match="under way"):
                call()
                pytest.fail(f"{name} has read what a work writes")

    during_a_receive(np.arange(24.0).reshape(4, 6), check)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda own: own[1::2], id="the other rows"),
        pytest.param(lambda own: own[[2]], id="a copy"),
        pytest.param(lambda own: own[3:0:-2, ::-1], id="the other rows, backwards"),
        pytest.param(lambda own: own[2:2], id="nothing"),
        pytest.param(lambda own: np.broadcast_to(own[:2, :1], (9, 2, 3)), id="rows before it"),
    ],
)
def test_memory_around_what_a_work_writes_may_be_read(view: Callable[[Any], Any]) -> None:
    def check(given: tuple[gradring.Communicator, Any]) -> None:
        comm, own = given
        x = view(own)
        assert (comm.all_gather(x) == np.concatenate([x, x])).all()
        assert (comm.reduce_scatter(x, "max") == np.array_split(x, 2)[comm.rank]).all()

    during_a_receive(np.arange(24.0).reshape(4, 6), check)


def test_a_commit_copies_no_array_that_a_work_writes() -> None:
    def check(given: tuple[gradring.Communicator, Any]) -> None:
        _, own = given
        with pytest.raises(ValueError, match="under way"):
            State(weights=own[:, 1])
        assert State(weights=own[1::2], words=np.array(["a", "bcd"])).weights.shape == (2, 6)

    during_a_receive(np.arange(24.0).reshape(4, 6), check)
