"""The one line that changes works in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commands import succeeded
from documents import ROOT, programs


def test_the_readme_shows_the_line() -> None:
    for document in ("README.md", "docs/coming-from-mwms.md"):
        assert (
            "```diff\n"
            "+ import gradring.tensorflow\n"
            "- strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
            "+ strategy = gradring.tensorflow.CustomCollectiveStrategy()\n"
            "```\n"
        ) in (ROOT / document).read_text()


@pytest.mark.parametrize(
    "strategy",
    [
        "CustomCollectiveStrategy()",
        # The diff, the other way round: the launcher serves both.
        pytest.param("tf.distribute.MultiWorkerMirroredStrategy()", marks=pytest.mark.slow),
    ],
)
def test_the_training_program_trains_under_both_strategies(tmp_path: Path, strategy: str) -> None:
    program = programs()["train.py"]
    assert program.count("strategy = CustomCollectiveStrategy()") == 1
    program = program.replace("strategy = CustomCollectiveStrategy()", f"strategy = {strategy}")
    tmp_path.joinpath("train.py").write_text(program)
    done = succeeded("run", "-np", 2, "--", sys.executable, "train.py", cwd=tmp_path)
    lines = done.stdout.splitlines()
    losses = [[line[4:] for line in lines if line.startswith(f"[{rank}] ")] for rank in (0, 1)]
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]
