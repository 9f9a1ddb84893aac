"""Commands as users type them, run to their end."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The interpreter as a word of a shell: its path may have a space.
PYTHON = shlex.quote(sys.executable)
#: A script that becomes the interpreter with its arguments.
AS_PYTHON = f'#!/bin/sh\nexec {PYTHON} "$@"\n'


def head_of_script(python: str = sys.executable) -> str:
    """The first lines of a Python script as pip writes them: a path after ``#!`` has no space."""
    return f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"


def command_line(*words: object) -> list[str]:
    """The command ``gradring`` of this interpreter."""
    return [sys.executable, "-m", "gradring", *map(str, words)]


def completed(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Any command, with these variables beside those of the tests."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def succeeded(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """``gradring``, which must not fail."""
    done = completed(command_line(*words), env=env, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
