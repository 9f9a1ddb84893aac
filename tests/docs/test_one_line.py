"""The one line that changes works in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.commands import succeeded
from support.documents import ROOT, programs

#: The page, and how it shows the import that is new and the line that changes.
SHOWN = {
    "README.md": (
        "import gradring.tensorflow  # new\n",
        "# changed: this was tf.distribute.MultiWorkerMirroredStrategy()\n"
        "strategy = gradring.tensorflow.CustomCollectiveStrategy()\n",
    ),
    "docs/coming-from-mwms.md": (
        "```diff\n"
        "+ import gradring.tensorflow\n"
        "- strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "+ strategy = gradring.tensorflow.CustomCollectiveStrategy()\n"
        "```\n",
    ),
}


@pytest.mark.parametrize("document", SHOWN)
def test_the_first_pages_show_the_line(document: str) -> None:
    page = (ROOT / document).read_text()
    assert all(lines in page for lines in SHOWN[document])


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
