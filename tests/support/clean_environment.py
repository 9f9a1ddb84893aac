"""The variables of the environment that tests see: a user's, and those that tests and builds need.

A variable of one machine hides defects: with ``PYTHONUNBUFFERED=1`` a command of the tests writes
each line at once, and a user's does not. `tests/conftest.py` removes all other variables, also for
a bare ``pytest``, and ``make test`` runs without them::

    python tests/support/clean_environment.py make lint
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

KEPT = re.compile(
    "|".join(
        (
            # A user's.
            "HOME|PATH|LANG|TZ|TMPDIR|LD_LIBRARY_PATH",
            # What make, pytest, coverage.py and the tests themselves give and read.
            "CI|MAKE.*|MFLAGS|PYTHON|VENV|PYTEST.*|COLUMNS|LINES|TEST_PROCESSES|COVERAGE_.*",
            "SEEDS?|MEMBERS_SEED|UPDATES_SEED|EVERY_WORLD_SIZE|SOURCE_DATE_EPOCH",
            "GRADRING_RAY_PYTHON|GRADRING_MPI_ENVIRONMENTS|SITE_PICTURES",
            # Compilers, and where Rust and other Pythons are.
            "CC|CXX|AR|RUSTFLAGS|RUSTC_WRAPPER|CARGO_.*|RUSTUP_.*|PYENV_ROOT|UV_.*|XDG_DATA_HOME",
            # Packages through a proxy or from a mirror.
            "PIP_.*|(?i:https?|all|no)_(?i:proxy)|.*_CA_BUNDLE|SSL_CERT_(FILE|DIR)|GIT_SSL_CAINFO",
        )
    )
)


def others(names: Iterable[str]) -> list[str]:
    """Those of these variables that tests do not see."""
    return [name for name in names if not KEPT.fullmatch(name)]


def clean() -> None:
    """Removes them from the environment of this process."""
    for name in others(os.environ):
        del os.environ[name]


if __name__ == "__main__":
    clean()
    os.execvp(sys.argv[1], sys.argv[1:])
