"""Programs that end while threads of theirs are inside collectives end well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading
sys.path.insert(0, {tests!r})
import numpy as np
import gradring
from pairs import Pair

pair = Pair()
enough = threading.Semaphore(0)

def work(comm):
    x, count = np.ones(4), 0
    while True:
        try:
            {call}
        except gradring.errors.GradringError:
            {failed}
        count += 1
        if count == 10:
            enough.release()

for comm in (pair.comm, pair.peer):
    threading.Thread(target=work, args=(comm,), daemon=True).start()
for _ in range(2):
    enough.acquire()
"""
CALLS = ("comm.all_reduce(x)", "comm.all_reduce_async(x).wait()", "comm.barrier()")
TIMES = 5


@pytest.mark.parametrize("failed", ["continue", pytest.param("return", marks=pytest.mark.slow)])
def test_daemon_threads_inside_collectives_do_not_abort_a_program_that_ends(
    failed: str, tmp_path: Path
) -> None:
    tests = str(Path(__file__).parents[1])
    for call in CALLS:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(tests=tests, call=call, failed=failed))
        for _ in range(TIMES):
            ended = subprocess.run(
                [sys.executable, str(program)], capture_output=True, text=True, timeout=100
            )
            assert (ended.returncode, ended.stderr) == (0, ""), (call, ended)


def test_the_exception_of_the_program_is_its_last_word(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    program = tmp_path / "program.py"
    for call in CALLS:
        text = PROGRAM.format(tests=tests, call=call, failed="raise")
        program.write_text(f"{text}raise ValueError('the cause')\n")
        ended = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, timeout=100
        )
        assert ended.returncode == 1
        assert ended.stderr.endswith("\nValueError: the cause\n"), (call, ended)
        assert ended.stderr.count("Traceback") == 1, (call, ended)
