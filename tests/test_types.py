"""Type checkers on the programs of the first pages, and on calls whose types they must find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.documents import ROOT, blocks

#: TensorFlow and Keras have no types, and the pages' functions do not say those of their arguments.
MYPY = ["--strict", "--allow-untyped-defs", "--disable-error-code", "import-untyped"]
CHECKERS = {
    "mypy": ["mypy", *MYPY, "--cache-dir", ".mypy_cache"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}
FIRST_PAGES = ("README.md", "docs/quick-start.md")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of what is checked."""
    directory = tmp_path_factory.mktemp("programs")
    shown = [block.program for block in blocks() if block.document in FIRST_PAGES and block.program]
    assert shown
    calls = "typed_calls.py", (ROOT / "tests" / "support" / "typed_calls.py").read_text()
    for name, text in [*shown, calls]:
        directory.joinpath(name).write_text(text)
    # Of two kinds of comment that switch an error off, mypy knows one: an unused one is an error.
    # What pyright would read in Keras' code as types are its defaults.
    directory.joinpath("pyrightconfig.json").write_text(
        '{"reportUnnecessaryTypeIgnoreComment": "error", "useLibraryCodeForTypes": false}'
    )
    return directory


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_finds_the_types_and_nothing_wrong(checker: str, programs: Path) -> None:
    command = [sys.executable, "-m", *CHECKERS[checker], "."]
    done = subprocess.run(command, cwd=programs, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
