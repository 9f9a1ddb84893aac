"""The recorder of optimizer steps, called without any training."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from gradring.records import trainings


class Optimizer:
    """One that a program makes, uses once and drops."""


def test_each_optimizer_has_a_number_of_its_own(tmp_path: Path) -> None:
    from gradring.tensorflow.stand_ins.recording import _Recorder

    trainings.begin(tmp_path / "one", 100)
    recorder = _Recorder(tmp_path / "one")
    for _ in range(3):
        recorder.note(Optimizer(), ["kernel"], 1.0, np.zeros(2), np.ones(2))
        gc.collect()
    recorder.warned("a loss is no mean")
    (read,) = trainings.read(tmp_path / "one", 1)
    assert [step.optimizer for step in read.steps] == [0, 1, 2]
    assert read.facts.warnings == ["a loss is no mean"]
