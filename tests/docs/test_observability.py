"""The programs and commands of docs/observability.md do what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
TRAIN = """
import os, time, numpy as np, gradring
with gradring.init(timeout=3) as comm:
    for step in range(5):
        if comm.rank == 1 and step == 4:
            time.sleep(8)
        comm.all_reduce(np.ones(98, np.float32), name="dense/kernel")
"""


def commands() -> list[str]:
    """Every command line of the document, in its order."""
    blocks = re.findall(r"\n\n```\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\w+=\S+ )?gradring ", line)]


def run(directory: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of the document with this interpreter."""
    words = shlex.split(command)
    settings = dict(word.split("=") for word in words if re.match(r"[A-Z_]+=", word))
    own = {"gradring": [sys.executable, "-m", "gradring"], "python": [sys.executable]}
    words = [part for word in words[len(settings) :] for part in own.get(word, [word])]
    return subprocess.run(
        words,
        cwd=directory,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the document's programs."""
    for name, text in re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    ):
        tmp_path.joinpath(name).write_text(text)
    tmp_path.joinpath("train.py").write_text(TRAIN)
    return tmp_path


def test_every_command_is_run_by_a_test_of_this_file() -> None:
    assert commands() == [
        "gradring run -np 2 python slow.py",
        "gradring run -np 2 --trace timeline.json python slow.py",
        "gradring explain timeline.json.parts --trace timeline.json",
        "GRADRING_FLIGHT_DIR=flight gradring run -np 3 python train.py",
        "gradring explain flight",
    ]


def test_the_slow_rank_is_named(directory: Path) -> None:
    done = run(directory, commands()[0])
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[0\] step \d+ \| .* \| slowest: rank 1 \S+ \+", done.stdout), done.stdout
    assert re.search(r"\[0\] Rank 1 on \S+ is the slowest", done.stdout)
    assert re.search(r"\[1\] \{'rank': 1, 'host': ", done.stdout)


def test_a_timeline_is_written(directory: Path) -> None:
    done = run(directory, commands()[1])
    assert done.returncode == 0, done.stderr
    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_parts_become_a_timeline(directory: Path) -> None:
    assert run(directory, "GRADRING_TRACE=timeline.json " + commands()[0]).returncode == 0
    done = run(directory, commands()[2])
    assert done.returncode == 0, done.stderr
    assert json.loads((directory / "timeline.json").read_text())["traceEvents"]


def test_the_rank_that_never_entered_is_named(directory: Path) -> None:
    assert run(directory, commands()[3]).returncode != 0
    done = run(directory, commands()[4])
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank 1 on \S+ never entered .*'dense/kernel' .*\(#5\); ranks 0", done.stdout)
