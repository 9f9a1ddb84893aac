"""Checksums change no bit of any result, over links of every kind."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from test_streams import digests

import gradring
from gradring import errors
from gradring.testing import run_ranks
from pairs import on_threads


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_have_the_same_bits_with_checksums(world_size: int) -> None:
    plain = digests(world_size, transport="tcp", checksum=False)
    assert all(len(digest) == 64 for digest in plain[0].values()), plain[0]
    links: dict[str, Any]
    for links in ({"transport": "tcp"}, {"transport": "tcp", "streams": 3}, {"transport": "shm"}):
        assert digests(world_size, **links, checksum=True) == plain


def rounded(comm: gradring.Communicator) -> bytes:
    x = np.random.default_rng(comm.rank).normal(size=300_001).astype(np.float32)
    return comm.all_reduce(x, op="mean").tobytes()


def test_rounded_elements_have_the_same_bits_with_checksums() -> None:
    with_and_without = [
        on_threads(3, rounded, wire_dtype="bfloat16", reproducible=True, checksum=checksum)
        for checksum in (True, False)
    ]
    assert with_and_without[0] == with_and_without[1]


def from_the_environment() -> tuple[bool, float]:
    with gradring.init() as comm:
        return comm.stats()["checksum"], float(comm.all_reduce(np.ones(100_000))[-1])


def test_the_variable_is_read() -> None:
    assert run_ranks(from_the_environment, 3, env={"GRADRING_CHECKSUM": "1"}) == [(True, 3.0)] * 3
    assert run_ranks(from_the_environment, 3, env={"GRADRING_CHECKSUM": "0"}) == [(False, 3.0)] * 3


def differ() -> None:
    gradring.init(checksum=os.environ["GRADRING_RANK"] == "1", timeout=20)


def test_ranks_that_differ_do_not_form_a_group() -> None:
    for outcome in run_ranks(differ, 2, check=False):
        assert isinstance(outcome.exception, errors.ConfigError), outcome
        assert outcome.exception.rank == 1
        assert "was started with streams=1, checksum=true, " in str(outcome.exception)
        assert "rank 0 with streams=1, checksum=false, " in str(outcome.exception)
