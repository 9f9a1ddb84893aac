"""`make test-matrix` and `make test-next`: the TensorFlow tests under several versions.

Each environment has the built wheel, and is kept below `.venv-matrix` with its last results. What
passed is recorded, and docs/compatibility.md made of it (version_table.py). versions.toml has the
versions.

    python tests/matrix.py dist/gradring-*.whl            # all columns of the table
    python tests/matrix.py dist/gradring-*.whl 3 4        # only the third and fourth column
    python tests/matrix.py dist/gradring-*.whl --next     # quick tests with what is released next
    python tests/matrix.py dist/gradring-*.whl --newest   # the same with what was released last

`make test-real-models` trains real models in the environments with the newest Keras of each
TensorFlow, and all of them in the developer's; real_models/report.py writes their tables.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from version_table import Record, Result, cells_of, read, record, summary
from versions import BOUNDS, MATRIX, ROOT, Versions

ENVIRONMENTS = ROOT / ".venv-matrix"
#: What the workflow puts into the issue that it opens.
REPORT = ROOT / "target" / "next.md"
#: For all tests of one environment.
TIMEOUT_S = 1800
ALL = ("-m", "slow or not slow", *(f"tests/{it}" for it in ("gradients", "tensorflow", "examples")))
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


@dataclass(frozen=True)
class Environment:
    """Packages below one directory."""

    name: str

    @property
    def directory(self) -> Path:
        """Where it is."""
        return ENVIRONMENTS / self.name

    @property
    def report(self) -> Path:
        """What pytest says of the last run."""
        return self.directory / "results.xml"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def pip(self, *arguments: str) -> None:
        """Runs pip."""
        command = [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *arguments], check=True)

    def make(self) -> None:
        """Makes it, without packages."""
        subprocess.run([sys.executable, "-m", "venv", str(self.directory)], check=True)

    def installed(self) -> Versions:
        """What it has."""
        found = json.loads(subprocess.check_output([self.python, "-c", _INSTALLED], text=True))
        return Versions(
            found["tensorflow_cpu"], found.get("keras_nightly") or found["keras"], found["tf_keras"]
        )


NEXT = Environment("next")


def of_column(versions: Versions) -> Environment:
    """The environment of one column."""
    return Environment(f"tensorflow-{versions.tensorflow}-keras-{versions.keras}")


def main() -> int:
    """Runs what is asked for; 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python tests/matrix.py", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("columns", type=int, nargs="*", help="from 1 on; default: all")
    parser.add_argument("--real-models", action="store_true", help="train these; no other test")
    parser.add_argument("--next", action="store_true", help="quick tests with the next versions")
    parser.add_argument("--newest", action="store_true", help="the same with the last column")
    given = parser.parse_args()
    wheel = given.wheel.absolute()
    if given.next:
        make_next(wheel)
        return quick(NEXT, is_next=True)
    newest = {versions.tensorflow: versions for versions in MATRIX}
    default = list(newest.values())[:-1] if given.real_models else MATRIX
    chosen = [MATRIX[-1]] if given.newest else [MATRIX[column - 1] for column in given.columns]
    failed = 0
    for versions in chosen or default:
        print(f"== {versions}", flush=True)
        make_environment(versions, wheel)
        environment = of_column(versions)
        if given.real_models:
            failed |= train_real_models(environment)
        elif given.newest:
            failed |= quick(environment)
        else:
            failed |= keep(environment, run_tests(environment, ALL))
    return failed


def make_environment(versions: Versions, wheel: Path) -> None:
    """A new one, or what is there with this wheel: the versions are part of its name."""
    environment = of_column(versions)
    if not environment.python.exists():
        environment.make()
        try:
            environment.pip(
                "install",
                f"tensorflow-cpu=={versions.tensorflow}",
                f"keras=={versions.keras}",
                *TOOLS,
            )
            # It wants the package `tensorflow`, which tensorflow-cpu is not.
            environment.pip("install", "--no-deps", f"tf_keras=={versions.tf_keras}")
        except BaseException:
            shutil.rmtree(environment.directory)
            raise
    environment.pip("install", "--no-deps", "--force-reinstall", str(wheel))


def make_next(wheel: Path) -> None:
    """What is released next, as of now."""
    if not NEXT.python.exists():
        NEXT.make()
    asked = [bounds.next for name, bounds in BOUNDS.items() if name in ("tensorflow", "numpy")]
    NEXT.pip("install", "--upgrade", *asked, *TOOLS)
    # A release of Keras has the same files, and comes with one of TensorFlow.
    NEXT.pip("uninstall", "--yes", "keras", "keras-nightly")
    NEXT.pip("install", "--upgrade", BOUNDS["keras"].next)
    NEXT.pip("install", "--upgrade", "--no-deps", BOUNDS["tf_keras"].next)
    NEXT.pip("install", "--no-deps", "--force-reinstall", str(wheel))


def run_tests(environment: Environment, tests: tuple[str, ...]) -> list[Result]:
    """Where the package of the source tree cannot be found, so that the wheel is imported."""
    environment.report.unlink(missing_ok=True)
    variables = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [
            *(
                str(environment.python),
                "-m",
                "pytest",
                "-q",
                "--tb=short",
                "-p",
                "no:cacheprovider",
            ),
            *("-o", "junit_family=xunit1", f"--junitxml={environment.report}"),
            *(str(ROOT / it) if it.startswith("tests/") else it for it in tests),
        ],
        cwd=environment.directory,
        env=variables,
        timeout=TIMEOUT_S,
        check=False,
    )
    return read(environment.report)


def keep(environment: Environment, results: list[Result], *, is_next: bool = False) -> int:
    """Records what passed; 1 if a test failed."""
    record(
        Record(
            environment.installed(),
            platform.python_version(),
            f"{platform.system()} {platform.machine()}",
            str(datetime.date.today()),
            cells_of(results),
            is_next,
        )
    )
    return int(not results or any(result.outcome == "failed" for result in results))


def quick(environment: Environment, *, is_next: bool = False) -> int:
    """Runs the quick tests and says what passed; those of the next versions are recorded."""
    results = run_tests(environment, QUICK)
    text = f"{environment.installed()}\n\n{summary(results)}\n"
    print(text)
    if is_next:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(f"`make test-next`\n\n```text\n{text}```\n")
        return keep(environment, results, is_next=True)
    return int(not results or any(result.outcome == "failed" for result in results))


def train_real_models(environment: Environment) -> int:
    """The eight trainings of `make test`, of which those that went right are recorded."""
    command = ["-m", "real_models.report", "--by-version", "--record"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [str(environment.python), *command], cwd=environment.directory, env=variables, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
