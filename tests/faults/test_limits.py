"""Limits of the system on memory, descriptors and threads. The rank without names itself, the
others name it, and all processes live."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.config.values import Transport
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.waiting import meet


def form_with_few(
    victim: int, rounds: dict[int, int], directory: Path, transport: Transport
) -> dict[int, str]:
    """Forms groups, by how many more files than before the victim may open: at which port."""
    said = {}
    rank = int(os.environ["GRADRING_RANK"])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for more, port in rounds.items():
        meet(directory / str(more), 2)
        if rank == victim:
            used = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
        try:
            rendezvous = f"127.0.0.1:{port}"
            with gradring.init(rendezvous=rendezvous, transport=transport, timeout=8) as comm:
                comm.barrier()
                said[more] = "formed"
        except errors.GradringError as error:
            said[more] = f"{type(error).__name__} {error.rank}: {error}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "files"), [(0, (1, 2, 3, 4, 5, 6)), (1, (0, 2, 3, 4, 5, 6))])
def test_a_rank_without_descriptors_says_so_and_which_limit_to_raise(
    victim: int, files: tuple[int, ...], tmp_path: Path
) -> None:
    rounds = dict(zip([*files, 100], free_ports(len(files) + 1), strict=True))
    said = run_ranks(form_with_few, 2, victim, rounds, tmp_path, "tcp", timeout=250)
    assert [of_rank[100] for of_rank in said] == ["formed"] * 2
    own, others = said[victim], said[1 - victim]
    assert sum(of_rank == "formed" for of_rank in own.values()) < 3
    for more in files:
        if own[more] == "formed":
            continue
        assert own[more].startswith(f"ConfigError {victim}: rank {victim} on "), own[more]
        assert "(ulimit -n)" in own[more] and "firewall" not in own[more], own[more]
        assert f"rank {victim}" in others[more], others[more]


@pytest.mark.parametrize(
    ("victim", "files"), [pytest.param(0, (6, 7, 8, 9), marks=pytest.mark.slow), (1, (6, 7, 8))]
)
def test_who_cannot_share_memory_for_want_of_descriptors_is_named_by_both(
    victim: int, files: tuple[int, ...], tmp_path: Path
) -> None:
    rounds = dict(zip([*files, 100], free_ports(len(files) + 1), strict=True))
    both = run_ranks(form_with_few, 2, victim, rounds, tmp_path, "shm", timeout=250)
    assert [said[100] for said in both] == ["formed"] * 2
    failed = [said[more] for said in both for more in files if said[more] != "formed"]
    refused = [text for text in failed if "share memory" in text]
    assert len(refused) > len(failed) / 2, both
    for text in refused:
        assert f": rank {victim}: Too many open files" in text and "(ulimit -n)" in text, text


@pytest.fixture(autouse=True)
def no_heaps_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that makes a heap of its own maps 128 MiB for a moment and 64 MiB for good. A
    limit measured in between leaves the rank so much too much."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


def limit_memory(over: int) -> None:
    """Leaves this process ``over`` bytes more than it uses."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + over
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def reduce_without_memory(dtype: str, count: int, settings: dict[str, str], over: int) -> list[str]:
    """Rank 1 has room for ``over`` bytes more than it uses; in the second round, for all."""
    said = []
    for round_ in range(2):
        with gradring.init(**settings, transport="tcp") as comm:  # type: ignore[arg-type]
            x = np.ones(count, dtype)
            if comm.rank == 1 and round_ == 0:
                limit_memory(over)
            try:
                comm.all_reduce(x)
                said.append(str(x[-1]))
            except errors.GradringError as error:
                said.append(f"{type(error).__name__} {error.rank}: {error}")
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return said


@pytest.mark.parametrize(
    ("dtype", "settings", "over"),
    [
        pytest.param("float16", {"algorithm": "ring"}, 16 << 20, marks=pytest.mark.slow),
        # Folds need a few blocks, however large the buffer is.
        ("float16", {"algorithm": "direct"}, 1 << 20),
        pytest.param(
            *("float32", {"algorithm": "ring", "wire_dtype": "bfloat16"}, 16 << 20),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_without_memory_names_itself_and_the_bytes_on_all_ranks(
    dtype: str, settings: dict[str, str], over: int
) -> None:
    count = 40_000_000
    for failed, right in run_ranks(
        reduce_without_memory, 3, dtype, count, settings, over, timeout=100
    ):
        assert failed.startswith("ConfigError 1: all_reduce(sum) "), failed
        assert "rank 1 on " in failed and " bytes of " in failed and "ulimit -v" in failed, failed
        assert right == "3.0"


def gather_without_memory(over: int) -> str:
    with gradring.init() as comm:
        x = np.ones(20_000_000)
        if comm.rank == 1:
            limit_memory(over)
        try:
            comm.all_gather(x, name="rows")
        except errors.GradringError as error:
            return f"{type(error).__name__} {error.rank}: {error}"
    return "fine"


def test_a_gather_for_whose_result_one_rank_has_no_memory_fails_on_all() -> None:
    for said in run_ranks(gather_without_memory, 2, 16 << 20):
        assert said.startswith("ConfigError 1: "), said
        assert "no memory for 320000000 bytes of all_gather 'rows'" in said, said
