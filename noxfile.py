"""Sessions of `make test-matrix` and `make test-next`: the TensorFlow tests under several versions.

tests/versions.toml has the versions. Each environment has the last built wheel, and is kept below
`.venv-matrix`. What passed is recorded, and docs/compatibility.md made of it
(tests/support/version_table.py).

    nox --session tensorflow                        # all columns of the table
    nox --session "tensorflow(2.18.1-3.9.2)"        # one of them
    nox --tags newest -- quick                      # the quick tests with what was released last
    nox --session next                              # the same with what is released next

`make test-real-models` trains real models in the environments with the newest Keras of each
TensorFlow but the last, which is the developer's; real_models/report.py writes their tables.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))

from support.version_table import Record, Result, cells_of, read, record, summary  # noqa: E402
from support.versions import BOUNDS, MATRIX, Versions  # noqa: E402

nox.options.default_venv_backend = "venv"
nox.options.envdir = ".venv-matrix"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tensorflow"]

#: What the workflow puts into the issue that it opens.
REPORT = ROOT / "target" / "next.md"
ALL = ("-m", "slow or not slow", "tests/gradients", "tests/tensorflow", "tests/examples")
#: In 10 minutes on two cores.
QUICK = ("--numprocesses", "2", "--dist", "loadfile", "tests/tensorflow")
#: What the tests import.
TOOLS = (
    *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.8"),
    *("scikit-learn>=1.4", "matplotlib>=3.8"),
)
_INSTALLED = (
    "import importlib.metadata as m, json; print(json.dumps("
    "{d.metadata['Name'].lower().replace('-', '_'): d.version for d in m.distributions()}))"
)
_NEWEST = {versions.tensorflow: versions for versions in MATRIX}.values()


def _column(versions: Versions) -> Any:
    tags = ["newest"] if versions == MATRIX[-1] else ["real-models"] * (versions in _NEWEST)
    return nox.param(versions, id=f"{versions.tensorflow}-{versions.keras}", tags=tags)


@nox.session
@nox.parametrize("versions", [_column(versions) for versions in MATRIX])
def tensorflow(session: nox.Session, versions: Versions) -> None:
    """All tests of one column; behind `--`, `quick` is fewer, and `real-models` trains these."""
    asked = f"tensorflow-cpu=={versions.tensorflow}", f"keras=={versions.keras}"
    session.install(*asked, *TOOLS)
    # It wants the package `tensorflow`, which tensorflow-cpu is not.
    session.install("--no-deps", f"tf_keras=={versions.tf_keras}")
    _install_wheel(session)
    if session.posargs == ["real-models"]:
        command = ("python", "-m", "real_models.report", "--by-version", "--record")
        session.run(*command, env={"PYTHONPATH": str(ROOT / "tests")})
    elif session.posargs == ["quick"]:
        results = _run_tests(session, QUICK)
        session.log(summary(results))
        _fail(session, results)
    else:
        _keep(session, _run_tests(session, ALL))


@nox.session
def next(session: nox.Session) -> None:
    """The quick tests with what is released next, as of now."""
    asked = [bounds.next for name, bounds in BOUNDS.items() if name in ("tensorflow", "numpy")]
    session.install("--upgrade", *asked, *TOOLS)
    # A release of Keras has the same files, and comes with one of TensorFlow.
    session.run("python", "-m", "pip", "uninstall", "--yes", "keras", "keras-nightly")
    session.install("--upgrade", BOUNDS["keras"].next)
    session.install("--upgrade", "--no-deps", BOUNDS["tf_keras"].next)
    _install_wheel(session)
    results = _run_tests(session, QUICK)
    text = f"{_installed(session)}\n\n{summary(results)}\n"
    session.log(text)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(f"`make test-next`\n\n```text\n{text}```\n")
    _keep(session, results, is_next=True)


def _install_wheel(session: nox.Session) -> None:
    wheel = max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    session.install("--no-deps", "--force-reinstall", str(wheel))


def _run_tests(session: nox.Session, tests: tuple[str, ...]) -> list[Result]:
    """What became of the tests, which import the wheel: no source tree is where they look."""
    report = Path(session.virtualenv.location, "results.xml").absolute()
    report.unlink(missing_ok=True)
    session.run(
        *("pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--session-timeout=1800"),
        *("-o", "junit_family=xunit1", f"--junitxml={report}", *tests),
        env={"PYTHONPATH": None},
        success_codes=range(256),
    )
    return read(report)


def _installed(session: nox.Session) -> Versions:
    found = json.loads(str(session.run("python", "-c", _INSTALLED, silent=True)))
    keras = found.get("keras_nightly") or found["keras"]
    return Versions(found["tensorflow_cpu"], keras, found["tf_keras"])


def _keep(session: nox.Session, results: list[Result], *, is_next: bool = False) -> None:
    """Records what passed."""
    record(
        Record(
            _installed(session),
            platform.python_version(),
            f"{platform.system()} {platform.machine()}",
            str(datetime.date.today()),
            cells_of(results),
            is_next,
        )
    )
    _fail(session, results)


def _fail(session: nox.Session, results: list[Result]) -> None:
    failed = [result.name for result in results if result.outcome == "failed"]
    if failed or not results:
        session.error(f"failed: {', '.join(failed) or 'no test ran'}")
