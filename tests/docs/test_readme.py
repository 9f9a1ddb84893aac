"""The README's programs and commands do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def programs() -> dict[str, str]:
    """The code blocks whose first line is a file name."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README.read_text(), re.DOTALL)
    return dict(blocks)


def run_two(directory: Path, program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gradring", "run", "-np", "2", "--", sys.executable, program],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_numpy_program_reduces(tmp_path: Path) -> None:
    tmp_path.joinpath("sum.py").write_text(programs()["sum.py"])
    lines = run_two(tmp_path, "sum.py")
    assert "[0] 0 2 0.5" in lines
    assert "[1] 1 2 0.5" in lines


@pytest.mark.parametrize(
    "strategy",
    [
        "CustomCollectiveStrategy()",
        # The diff at the top, the other way round: the launcher serves both.
        "tf.distribute.MultiWorkerMirroredStrategy()",
    ],
)
def test_the_training_program_trains_under_both_strategies(tmp_path: Path, strategy: str) -> None:
    program = programs()["train.py"]
    assert program.count("strategy = CustomCollectiveStrategy()") == 1
    program = program.replace("strategy = CustomCollectiveStrategy()", f"strategy = {strategy}")
    tmp_path.joinpath("train.py").write_text(program)
    lines = run_two(tmp_path, "train.py")
    losses = [[line[4:] for line in lines if line.startswith(f"[{rank}] ")] for rank in (0, 1)]
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", README.with_name("Makefile").read_text(), re.M))
    for document in ("README.md", "CONTRIBUTING.md"):
        used = re.findall(r"^make ([a-z-]+)", README.with_name(document).read_text(), re.M)
        assert used
        assert set(used) <= targets, document
