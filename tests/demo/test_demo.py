"""``gradring demo`` as a user types it, from start to end."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

DEADLINE_S = 480.0
TRAININGS = ("gradring", "multi-worker-mirrored", "single")
ROW = re.compile(r"^(?P<training>\S+) +(?P<rank>\d) .*  (?P<hash>[0-9a-f]{16})$", re.MULTILINE)

# An import would cost every process of the tests seconds, also those that run others.
needed = all(map(importlib.util.find_spec, ("tensorflow", "sklearn", "matplotlib")))
pytestmark = [
    pytest.mark.timeout(DEADLINE_S + 60),
    pytest.mark.skipif(not needed, reason="needs the extra demo"),
]


class Run(NamedTuple):
    """What a run of the demo left behind."""

    exit_code: int
    output: str
    report: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo, run once for all tests, in a directory outside of the source tree."""
    directory = tmp_path_factory.mktemp("demo")
    completed = subprocess.run(
        [sys.executable, "-m", "gradring", "demo", "--report", "report"],
        cwd=directory,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=DEADLINE_S,
        check=False,
    )
    return Run(completed.returncode, completed.stdout, directory / "report")


def test_every_check_passes(finished: Run) -> None:
    assert finished.exit_code == 0, finished.output
    assert finished.output.count("\npassed  ") == 3
    assert "FAILED" not in finished.output


def test_the_table_has_both_ranks_with_one_hash(finished: Run) -> None:
    rows = list(ROW.finditer(finished.output))
    assert [(row["training"], row["rank"]) for row in rows] == [
        ("gradring", "0"),
        ("gradring", "1"),
        ("multi-worker-mirrored", "0"),
        ("multi-worker-mirrored", "1"),
        ("single", "0"),
    ]
    assert rows[0]["hash"] == rows[1]["hash"]


def test_the_accuracy_is_high_enough(finished: Run) -> None:
    match = re.search(r"The test accuracy is (0\.\d+);", finished.output)
    assert match is not None
    assert float(match[1]) >= 0.97


def test_the_weights_are_those_of_a_single_process(finished: Run) -> None:
    match = re.search(r"no weight differs by\s+more than\s+(\S+)", finished.output)
    assert match is not None
    assert float(match[1]) <= 1e-5


def test_it_compares_with_the_native_strategy_and_claims_no_speed_up(finished: Run) -> None:
    said = " ".join(finished.output.split())
    assert re.search(r"MultiWorkerMirroredStrategy takes [\d.]+ ms per step", said)
    assert "shows overhead, not scaling" in said


def test_each_training_shows_its_progress(finished: Run) -> None:
    for training in TRAININGS:
        shown = re.findall(rf"^{training} +epoch (\d+)/20 step \d+ loss ", finished.output, re.M)
        assert shown == ["5", "10", "15", "20"]


def test_the_report_has_a_picture_and_the_logs(finished: Run) -> None:
    from matplotlib import image

    pixels = image.imread(finished.report / "comparison.png")
    height, width, _ = pixels.shape
    assert width > 1000
    assert height > 400
    colours = {tuple(pixel) for row in pixels[::5, ::5] for pixel in row.round(2)}
    assert len(colours) > 20
    logs = [str(path.relative_to(finished.report)) for path in finished.report.glob("*/*.log")]
    ranks = [f"{training}/rank-{rank}.log" for training in TRAININGS[:2] for rank in range(2)]
    assert sorted(logs) == [*ranks, "single/rank-0.log"]
