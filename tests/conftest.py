"""Options shared by all tests."""

from __future__ import annotations

import datetime
import functools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import clean_environment

# The tests of a wheel load this file where the package is not installed.
if TYPE_CHECKING:
    from support.rank_template import Templates

FLAKY = Path(__file__).with_name("flaky.txt")


def pytest_configure() -> None:
    """Makes variables and signals a user's."""
    clean_environment.clean()
    let_signals_mean_what_they_mean()


def pytest_runtest_setup() -> None:
    """Does so again: processes that a test starts inherit what another test has left."""
    let_signals_mean_what_they_mean()


def let_signals_mean_what_they_mean() -> None:
    """Signals mean what they mean in a terminal, also when the tests run in the background.

    Shells start background commands, and nohup and supervisors start all, with some signals ignored
    or blocked, and every process that a test starts would inherit that.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for signum in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # as Python has them
        if signal.getsignal(signum) == signal.SIG_IGN:
            is_interrupt = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes what passed only the second time: who finds a line there mends the test."""
    is_again = report.when == "call" and report.passed and getattr(report, "rerun", 0) > 0
    if is_again and "PYTEST_XDIST_WORKER" not in os.environ:
        with FLAKY.open("a") as file:
            file.write(f"{datetime.date.today()} {report.nodeid}\n")


def pytest_sessionfinish() -> None:
    """Saves what `make coverage` measures: pytest-xdist kills a worker that ends too slowly."""
    if "coverage" in sys.modules:
        current = sys.modules["coverage"].Coverage.current()
        if current is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a process that has run none of the package
                current.save()


class SkippedProcess(subprocess.Popen):  # type: ignore[type-arg]
    """Of a run that starts none: a test that gets here ends here."""

    def __init__(self, *_: object, **__: object) -> None:
        pytest.skip("starts a process")

    def __del__(self, *_: object) -> None:
        """There is nothing to wait for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, help="a built wheel; runs the tests of tests/packaging")
    parser.addoption(
        "--in-one-process", action="store_true", help="skips each test where it starts a process"
    )
    parser.addoption(
        "--engines", action="store_true", help="runs the tests of tests/engines (Slurm, MPI, Ray)"
    )
    parser.addoption(
        "--machines", action="store_true", help="runs the tests of tests/machines (QEMU)"
    )


@pytest.fixture(scope="session", autouse=True)
def processes_are_started(pytestconfig: pytest.Config) -> Iterator[None]:
    """Or not: then a test ends where it would start one."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--in-one-process"):
            patch.setattr(subprocess, "Popen", SkippedProcess)
        yield


@pytest.fixture(scope="session")
def templates() -> Iterator[Templates]:
    """Processes whose copies are ranks."""
    from support.rank_template import Templates

    with Templates() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def ranks_are_copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of processes with TensorFlow, in files of tests that have the word ``tensorflow``."""
    if request.path.parent.name == "packaging":  # whose environments have no package
        yield
        return
    from gradring.testing import harness, network

    tensorflow = "tensorflow" in f"{request.path.parent.name} {request.path.read_text()}"
    start = functools.partial(request.getfixturevalue("templates").start, tensorflow=tensorflow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "start_interpreter", start)
        if (reason := network.why_unavailable()) is not None:
            # A test is skipped where it gets to its simulated hosts.
            patch.setattr(network, "why_unavailable", lambda: pytest.skip(reason))
        yield


@pytest.fixture
def simulated_hosts_are_possible() -> None:
    """For a test that has another process simulate hosts."""
    from gradring.testing import network

    network.why_unavailable()


@pytest.fixture
def fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test whose ranks import all themselves."""
    from gradring.testing import harness
    from support.rank_template import start_interpreter

    monkeypatch.setattr(harness, "start_interpreter", start_interpreter)


@pytest.fixture(scope="session")
def wheel(pytestconfig: pytest.Config) -> Path:
    """The wheel of ``--wheel``."""
    path = pytestconfig.getoption("--wheel")
    assert isinstance(path, Path) and path.is_file()
    return path.absolute()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take longest come first: begun last, one would run on alone."""
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), marker.args[0] if marker else 0.0)
    items.sort(key=lambda item: -limits[item.path])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out what needs more than this package.

    The packaging tests are about one wheel; without one there is nothing to test. The engines have
    to be installed, which `make test-engines` does, and take minutes. So have QEMU and kernels,
    which `make test-machines` installs.
    """
    if collection_path.name == "packaging" and config.getoption("--wheel") is None:
        return True
    if collection_path.name in ("engines", "machines"):
        return None if config.getoption(f"--{collection_path.name}") else True
    return None
