"""Options shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, help="a built wheel; runs the tests of tests/packaging")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The packaging tests are about one wheel; without one there is nothing to test."""
    if collection_path.name == "packaging" and config.getoption("--wheel") is None:
        return True
    return None
