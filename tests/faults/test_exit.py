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
from support.pairs import Pair

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


def ended(call: str, failed: str, end: str = "") -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parents[1])
    program = PROGRAM.format(tests=tests, call=call, failed=failed) + end
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("failed", ["continue", pytest.param("return", marks=pytest.mark.slow)])
def test_daemon_threads_inside_collectives_do_not_abort_a_program_that_ends(failed: str) -> None:
    for call in CALLS:
        for _ in range(TIMES):
            done = ended(call, failed)
            assert (done.returncode, done.stderr) == (0, ""), (call, done)


def test_the_exception_of_the_program_is_its_last_word() -> None:
    for call in CALLS:
        done = ended(call, "raise", "raise ValueError('the cause')\n")
        assert done.returncode == 1
        assert done.stderr.endswith("\nValueError: the cause\n"), (call, done)
        assert done.stderr.count("Traceback") == 1, (call, done)
