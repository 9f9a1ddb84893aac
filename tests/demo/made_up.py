"""Results and output that no training has produced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gradring.tools.demo.report import RankResult, Results


def rank_result(rank: int = 0, **changes: Any) -> RankResult:
    """A rank that trained well."""
    result = RankResult(
        training="gradring",
        rank=rank,
        steps=400,
        samples_per_step=36,
        parts_ms=(6.0, 1.0, 2.0),
        percentiles_ms=(9.0, 12.5, 30.0),
        accuracy=0.98,
        weights_hash="5e" * 8,
        weights=(np.ones((2, 3), np.float32), np.zeros(4, np.float32)),
    )
    return replace(result, **changes)


def results(**changes: Any) -> Results:
    """A demo that went well."""
    ranks = (rank_result(0), rank_result(1))
    whole = Results(
        gradring=ranks,
        mirrored=tuple(
            replace(rank, training="multi-worker-mirrored", parts_ms=(18.0, 0.0, 0.0))
            for rank in ranks
        ),
        single=rank_result(training="single", samples_per_step=72, parts_ms=(8.0, 0.0, 0.0)),
    )
    return replace(whole, **changes)


@dataclass
class Printed:
    """Takes the place of a training, and prints what one has printed."""

    text: str
    exit_code: int | None = 0
    started: list[Any] = field(default_factory=list)

    def __call__(
        self,
        world_size: int,
        log_dir: Path,
        options: Sequence[str],
        show: Callable[[str], object],
        launch: Sequence[str] = (),
    ) -> tuple[int | None, list[tuple[float, str]]]:
        self.started.append((world_size, log_dir, options, launch))
        lines = self.text.splitlines(keepends=True)
        for line in lines:
            show(line)
        return self.exit_code, [(time.monotonic(), line) for line in lines]

    def instead_of(self, demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Printed:
        monkeypatch.setattr(demo, "require_packages", lambda: None)
        monkeypatch.setattr(demo, "run_script", self)
        return self
