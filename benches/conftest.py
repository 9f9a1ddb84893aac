"""The two ranks, the ratio table at the end, and the record of the run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import gradring
from benches import peer_rank
from gradring import machine
from gradring.bench import table
from gradring.bench.measurement import Measurement
from gradring.bench.options import Options
from gradring.bench.record import Record
from gradring.bench.systems import LocalSystem
from gradring.launch.processes import RankProcesses
from gradring.launch.ranks import rank_environments

WORLD_SIZE = 2
#: Time for rank 1 to end by itself.
PEER_END_S = 30
RESULTS = Path(__file__).parent / "results"


#: Of the machine before anything is measured; tells whether others were using it.
LOAD_AT_START = machine.load()


@pytest.fixture(scope="session")
def comm() -> Iterator[gradring.Communicator]:
    """This process as rank 0; rank 1 is a process of its own that follows."""
    pytest.importorskip("tensorflow", reason="pip install 'gradring[tensorflow]'")
    Options(WORLD_SIZE, (4,), peers=("tensorflow",)).check()
    own, other = rank_environments(os.environ, WORLD_SIZE, tf_config=False)
    with RankProcesses() as processes:
        peer = processes.start([sys.executable, peer_rank.__file__], other)
        with patch.dict(os.environ, own):
            comm = gradring.init(transport=peer_rank.TRANSPORT)
        with comm:
            yield comm
            peer_rank.told(comm, 0, 0)
        peer.popen.wait(PEER_END_S)


@pytest.fixture(scope="session")
def systems(comm: gradring.Communicator) -> Sequence[LocalSystem]:
    return peer_rank.open_systems(comm)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints times as ratios; records them if everything was measured and right."""
    benchmarks = config._benchmarksession.benchmarks  # type: ignore[attr-defined]
    measured = [_measurement(b) for b in benchmarks if "system" in b.extra_info]
    if not measured:
        return
    terminalreporter.section("p50, p90 and p99")
    for line in table.compared(measured):
        terminalreporter.write_line(line)
    if any(terminalreporter.stats.get(kind) for kind in ("failed", "error", "deselected")):
        terminalreporter.write_line("not recorded: not everything was measured, or right")
        return
    path = _record(measured)
    terminalreporter.write_line(f"recorded in {path.relative_to(config.rootpath)}")


def _measurement(benchmark: Any) -> Measurement:
    return Measurement.of(
        benchmark.stats.data,
        world_size=WORLD_SIZE,
        dtype=peer_rank.DTYPE,
        **benchmark.extra_info,
    )


def _record(measured: list[Measurement]) -> Path:
    ended = Record.begin("make bench", None, ["tensorflow"])
    record = replace(ended, load_at_start=LOAD_AT_START, measurements=measured)
    place = re.sub(r"[^a-z0-9]+", "-", record.machine.lower()).strip("-")
    path = RESULTS / f"{record.date.split()[0]}-{place}.json"
    RESULTS.mkdir(exist_ok=True)
    record.write(path)
    return path
