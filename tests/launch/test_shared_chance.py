"""Random numbers under ``gradring run --with-strategy``: a program draws the same on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import completed
from support.installed import environment_with_start_hook

#: Draws before any layer is made, by each source; then has a process of its own draw.
PROGRAM = """\
import json, os, random, subprocess, sys
import numpy as np
drawn = [random.random(), np.random.permutation(9).tolist(), np.random.default_rng().random(),
         np.random.default_rng().random(), list({"a", "b", "c", "d", "e", "f", "g", "h"})]
own = "import numpy as np; print(np.random.rand())"
child = float(subprocess.run([sys.executable, "-c", own], capture_output=True, text=True).stdout)
with open(f"{sys.argv[1]}/{os.environ['GRADRING_RANK']}.json", "w") as file:
    json.dump({"drawn": drawn, "child": child}, file)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with_start_hook(tmp_path_factory.mktemp("installed") / "venv")


def drawn(python: Path, directory: Path, *options: str) -> list[dict[str, object]]:
    (directory / "draw.py").write_text(PROGRAM)
    command = [str(python), "-m", "gradring", "run", *options, "-np", "2", "draw.py", "."]
    done = completed(command, cwd=directory)
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_that_know_of_no_others_draw_the_same_numbers(python: Path, tmp_path: Path) -> None:
    first, second = drawn(python, tmp_path, "--with-strategy")
    assert first["drawn"] == second["drawn"]
    assert first["child"] != second["child"], "a process that a rank starts has seeds of its own"
    again, _ = drawn(python, tmp_path, "--with-strategy")
    assert again["drawn"] != first["drawn"], "each job has other numbers"


def test_other_ranks_draw_their_own(python: Path, tmp_path: Path) -> None:
    first, second = drawn(python, tmp_path)
    assert first["drawn"] != second["drawn"]
