"""Lines of the logger ``gradring`` in the output of a program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging
import gradring
logger = logging.getLogger("gradring")
{program}
logger.info("quiet")
logger.warning("rank %d waits", 3)
"""


@pytest.mark.parametrize(
    ("program", "level", "expected"),
    [
        ("", "", ["gradring: rank 3 waits"]),
        ("gradring.init()", "DEBUG", ["gradring: quiet", "gradring: rank 3 waits"]),
        ("logging.basicConfig()", "", ["WARNING:gradring:rank 3 waits"]),
        ("logger.addHandler(logging.StreamHandler())", "", ["rank 3 waits"]),
        ("logger.propagate = False", "", ["gradring: rank 3 waits"]),
    ],
    ids=["not configured", "level", "root handler", "own handler", "no propagation"],
)
def test_lines_have_a_prefix_unless_the_program_configures_logging(
    program: str, level: str, expected: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program=program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GRADRING_LOG": level},
    )
    assert [line for line in done.stderr.splitlines() if "[" not in line] == expected, done.stderr
