"""Shared memory: which ranks of one host share it, and what is said about those that cannot."""

from __future__ import annotations

import io
import logging
import os
import resource

import numpy as np
import pytest

import gradring
from gradring.config.values import Transport
from gradring.testing import run_ranks

REASON = "no shared memory from the system: File too large (os error 27)"


def reduce_without_shared_memory(
    limited: list[int], transport: Transport
) -> tuple[str, str, float]:
    """The ranks in ``limited`` cannot make files, of which shared memory is made."""
    log = io.StringIO()  # stderr is a file too
    logging.getLogger("gradring").addHandler(logging.StreamHandler(log))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["GRADRING_RANK"]) in limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
    try:
        comm = gradring.init(transport=transport)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    with comm:
        total = comm.all_reduce(np.ones(3))
        return log.getvalue(), comm.stats()["transport"], float(total[2])


@pytest.mark.parametrize("limited", [[0, 1], [0]], ids=str)
def test_ranks_that_cannot_share_memory_use_tcp_and_say_why(limited: list[int]) -> None:
    for rank, result in enumerate(run_ranks(reduce_without_shared_memory, 2, limited, "auto")):
        said, *reduced = result
        assert reduced == ["tcp", 2.0]
        assert said.startswith(f"rank {rank} uses TCP to rank {1 - rank} of the same host: ")
        assert said.endswith(f"{REASON}\n") and said.count("\n") == 1


def test_ranks_that_must_share_memory_and_cannot_say_why() -> None:
    for outcome in run_ranks(reduce_without_shared_memory, 2, [0, 1], "shm", check=False):
        assert isinstance(outcome.exception, gradring.errors.ConfigError), outcome
        assert f"cannot share memory with it: {REASON}" in str(outcome.exception)


def share_with_all() -> str:
    with gradring.init() as comm:
        x = np.full(3, comm.rank, np.float32)
        assert (comm.all_reduce(x) == sum(range(comm.world_size))).all()
        return str(comm.stats()["transport"])


@pytest.mark.slow
def test_64_ranks_of_one_host_share_memory() -> None:
    """As many as are connected with one another: 2016 pairs, on however few cores."""
    assert run_ranks(share_with_all, 64, timeout=280) == ["shm"] * 64
