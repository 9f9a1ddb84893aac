"""The two ranks, the ratio table at the end, and the record of the run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import gradring
from benches import peer_rank
from gradring.launch.processes import RankProcesses
from gradring.launch.ranks import rank_environments
from gradring.tools.bench import table
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.options import Options
from gradring.tools.bench.record import Record
from gradring.tools.bench.systems import System

WORLD_SIZE = 2
#: Beside what pytest-benchmark keeps, which git ignores.
RECORD = Path(__file__).parents[1] / ".benchmarks" / "all-reduce.json"

NATIVE = "tensorflow-raw is CollectiveReduceV2, tensorflow-strategy MultiWorkerMirroredStrategy."

#: Of the run: its date and its load are of before anything is measured.
BEGUN = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_ = "where `pytest benches` records what it measured (default .benchmarks/all-reduce.json)"
    parser.addoption("--record", type=Path, default=RECORD, metavar="FILE.json", help=help_)


def pytest_configure(config: pytest.Config) -> None:
    command = shlex.join(["pytest", *config.invocation_params.args])
    config.stash[BEGUN] = Record.begin(command, None, ["tensorflow"])


@pytest.fixture(scope="session")
def comm() -> Iterator[gradring.Communicator]:
    """This process as rank 0; rank 1 is a process of its own that follows."""
    pytest.importorskip("tensorflow", reason="pip install 'gradring[tensorflow]'")
    Options(WORLD_SIZE, (4,), peers=("tensorflow",)).check()
    own, other = rank_environments(os.environ, WORLD_SIZE, tf_config=False)
    with RankProcesses() as processes:
        processes.start([sys.executable, peer_rank.__file__], other)
        with patch.dict(os.environ, own):
            comm = gradring.init(transport=peer_rank.TRANSPORT)
        with comm:
            yield comm
            peer_rank.told(comm, 0, 0)


@pytest.fixture(scope="session")
def systems(comm: gradring.Communicator) -> Sequence[System]:
    return peer_rank.open_systems(comm)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints times as ratios; records them if all results were right."""
    benchmarks = config._benchmarksession.benchmarks  # type: ignore[attr-defined]
    record = config.stash[BEGUN]
    record.measurements[:] = [_measurement(b) for b in benchmarks if "system" in b.extra_info]
    if not record.measurements:
        return
    terminalreporter.section("p50, p90 and p99")
    terminalreporter.write_line(NATIVE)
    for line in table.compared(record.measurements):
        terminalreporter.write_line(line)
    if any(terminalreporter.stats.get(kind) for kind in ("failed", "error")):
        terminalreporter.write_line("not recorded: not everything was right")
        return
    path: Path = config.getoption("record", RECORD)
    path.parent.mkdir(parents=True, exist_ok=True)
    record.write(path)
    terminalreporter.write_line(f"recorded in {path}")


def _measurement(benchmark: Any) -> Measurement:
    return Measurement.of(
        benchmark.stats.data,
        world_size=WORLD_SIZE,
        dtype=peer_rank.DTYPE,
        **benchmark.extra_info,
    )
