"""A connection that leads to another rank or another job is noticed before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.certificates import Authority

LOCAL = "127.0.0.1"
SWAPPED = {1: 2, 2: 1}
"""Ranks of which each is found where the other listens, as after a swap of two names."""


def reduce_through_swapped_addresses(ports: list[int]) -> bool:
    rank = int(os.environ["GRADRING_RANK"])
    with gradring.init(
        transport="tcp",
        algorithm="direct",
        checksum=True,
        listen=f"{LOCAL}:{ports[rank]}" if rank else None,
        announce=f"{LOCAL}:{ports[SWAPPED[rank]]}" if rank in SWAPPED else None,
    ) as comm:
        x = np.full(1 << 20, float(comm.rank), np.float32)
        return bool((comm.all_reduce(x) == 6.0).all())


@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_swapped_addresses_of_two_members_end_the_start(tls: bool, tmp_path: Path) -> None:
    env = Authority(tmp_path).certify("all", LOCAL).variables() if tls else {}
    outcomes = run_ranks(reduce_through_swapped_addresses, 4, free_ports(4), env=env, check=False)
    for outcome in outcomes:
        error = outcome.exception
        assert isinstance(error, errors.RendezvousError), outcome.details()
        assert error.rank in SWAPPED
        text = str(error)
        named = f"connected to rank {error.rank} and reached rank {SWAPPED[error.rank]}"
        assert named in text, text


def join_as_a_job(jobs: dict[int, str]) -> int:
    os.environ["GRADRING_JOB_ID"] = jobs[int(os.environ["GRADRING_RANK"])]
    os.environ.pop("GRADRING_TOKEN", None)
    with gradring.init(timeout=5) as comm:
        return comm.world_size


@pytest.mark.slow  # group.rs has a quick one
def test_ranks_of_two_jobs_form_no_group_even_without_a_token() -> None:
    first, second = run_ranks(join_as_a_job, 2, {0: "a", 1: "b"}, check=False)
    for outcome, who in ((first, None), (second, 0)):
        error = outcome.exception
        assert isinstance(error, errors.RendezvousError), outcome.details()
        assert who is None or error.rank == who
        assert "rank 1 was started by job b, rank 0 by job a" in str(error)
    assert first.exception is not None and "did not join" in str(first.exception)
