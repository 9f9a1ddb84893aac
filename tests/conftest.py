"""Options shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Signals mean what they mean in a terminal, also when the tests run in the background.

    Shells start background commands, and nohup starts all, with some signals ignored, and every
    process that a test starts would inherit that.
    """
    for signum, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, help="a built wheel; runs the tests of tests/packaging")
    parser.addoption(
        "--engines", action="store_true", help="runs the tests of tests/engines (Slurm, MPI, Ray)"
    )


@pytest.fixture(scope="session")
def wheel(pytestconfig: pytest.Config) -> Path:
    """The wheel of ``--wheel``."""
    path = pytestconfig.getoption("--wheel")
    assert isinstance(path, Path) and path.is_file()
    return path.absolute()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out what needs more than this package.

    The packaging tests are about one wheel; without one there is nothing to test. The engines have
    to be installed, which `make test-engines` does, and take minutes.
    """
    if collection_path.name == "packaging" and config.getoption("--wheel") is None:
        return True
    if collection_path.name == "engines" and not config.getoption("--engines"):
        return True
    return None
