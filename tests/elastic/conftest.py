"""Fixtures of tests of elastic trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A directory of its own, in which the processes of a training tell what has happened."""
    (tmp_path / "stage").mkdir()
    return Stage(tmp_path / "stage")
