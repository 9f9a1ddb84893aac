"""Programs of Keras 3 that know of no replicas train as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("given_programs.py")


def ran(directory: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    return subprocess.run(
        [*launcher, sys.executable, PROGRAMS, directory],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=480,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = ran(tmp_path_factory.mktemp("alone") / "files")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_that_know_of_no_replicas_train_as_in_one_process(
    alone: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    launcher = [sys.executable, "-m", "gradring", "run", "--with-strategy", "-np", str(ranks), "--"]
    done = ran(tmp_path / "files", *launcher)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == ranks
    for name, expected in alone.items():
        for together in found:
            numbers = flat(together[name])
            assert numbers == pytest.approx(flat(expected), rel=2e-5, abs=2e-6), name
    warnings = [line for line in done.stderr.splitlines() if "(GRADRING_WITH_STRATEGY)" in line]
    # Of each optimizer that a loop of the program's own has, and of nothing that is right.
    outside = [line for line in warnings if "outside of Keras' fit" in line]
    assert len(outside) == 1 and outside[0].startswith("[0] "), warnings
    assert len(warnings) == 2, warnings


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return [] if value is None else [value]
    return [number for part in value for number in flat(part)]
