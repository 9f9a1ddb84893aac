"""Results and output that no training has produced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gradring.observe.step_report import Totals
from gradring.tools.demo import story
from gradring.tools.demo.results import RankResult, Results


def rank_result(rank: int = 0, **changes: Any) -> RankResult:
    """A rank that trained well."""
    result = RankResult(
        rank=rank,
        host="node-a",
        samples_per_step=36,
        totals=Totals(steps=1000, elapsed_s=9.0, comm_s=1.0, wait_s=2.0, input_s=0.5),
        percentiles_ms=(9.0, 12.5, 30.0),
        local_ms=5.0,
        losses=(2.0, 1.0, 0.5, 0.25),
        accuracies=(0.5, 0.98),
        weights=(np.ones((2, 3), np.float32), np.zeros(4, np.float32)),
    )
    return replace(result, **changes)


def results(**changes: Any) -> Results:
    """A demo that went well."""
    ranks = (rank_result(0), rank_result(1))
    slow = Totals(steps=1000, elapsed_s=18.0)
    whole = Results(
        gradring=ranks,
        mirrored=tuple(
            replace(rank, totals=slow, percentiles_ms=(18.0, 20.0, 45.0)) for rank in ranks
        ),
        single=rank_result(samples_per_step=72, totals=Totals(steps=1000, elapsed_s=8.0)),
        cores=2,
        others={"gradring": 0.02, "MultiWorkerMirrored": 0.03, "single process": 0.01},
    )
    return replace(whole, **changes)


@dataclass
class Printed:
    """Takes the place of a training, and prints what one has printed."""

    text: str
    exit_code: int | None = 0
    started: list[Any] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> int | None:
        *how, on_line = arguments
        self.started.append(how)
        for line in self.text.splitlines(keepends=True):
            on_line(line)
        return self.exit_code

    def instead_of(self, demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Printed:
        monkeypatch.setattr(demo, "require_packages", lambda: None)
        monkeypatch.setattr(story, "run_script", self)
        return self
