"""Hot paths of the Python binding, called under valgrind.

Two ranks are in this process. The other one has sent all it has, and sleeps, when the counted one
begins: that one never waits, and so does the same in every run.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from support.pairs import Pair
from support.waiting import wait_until

T = TypeVar("T")

ROUNDS = 16
#: In one step, that is: where there are two, each rank waits for the other one's first.
SETTINGS = {"transport": "tcp", "algorithm": "one_shot"}
#: Tells callgrind what to count, as it does not see that ctypes calls a function by its name.
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_ZERO_STATS; CALLGRIND_TOGGLE_COLLECT; }
void end(void) { CALLGRIND_TOGGLE_COLLECT; CALLGRIND_DUMP_STATS; }
"""


def compiled() -> ctypes.CDLL:
    """The library with these functions."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "marks.so"
        command = ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=MARKS, check=True, text=True)
        return ctypes.CDLL(str(library))


class Counted:
    """The paths of one rank beside another."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.marks = compiled()

    def count(self, name: str, path: Callable[[], T]) -> T:
        """What ``path`` returns."""
        print(name, flush=True)
        self.marks.begin()
        result = path()
        self.marks.end()
        return result

    def all_reduce(self, name: str, size_bytes: int) -> None:
        """Blocking."""
        own, theirs = np.ones((2, size_bytes // 4), np.float32)
        for _ in range(ROUNDS):
            other = self.pair.comm.all_reduce_async(theirs)
            self.pair.wait_until_rank_0_waits()
            self.count(f"all_reduce, {name}", partial(self.pair.peer.all_reduce, own))
            other.wait()

    def plan(self) -> None:
        """A prepared one."""
        own, theirs = np.ones((2, 1), np.float32)
        plan = self.pair.peer.prepare(own)
        for _ in range(ROUNDS):
            other = self.pair.comm.all_reduce_async(theirs)
            self.pair.wait_until_rank_0_waits()
            self.count("plan of an all_reduce, 4 B", plan)
            other.wait()

    def all_reduce_async(self) -> None:
        """A start and a wait, between which the collective ends."""
        own, theirs = np.ones((2, 1), np.float32)
        for _ in range(ROUNDS):
            other = self.pair.comm.all_reduce_async(theirs)
            self.pair.wait_until_rank_0_waits()
            start = partial(self.pair.peer.all_reduce_async, own)
            work = self.count("all_reduce_async, 4 B", start)
            wait_until(work.done, "the work ends")
            self.count("wait of its work", work.wait)
            other.wait()


if __name__ == "__main__":
    with Pair(**SETTINGS) as pair:
        counted = Counted(pair)
        counted.all_reduce("4 B", 4)
        counted.all_reduce("64 KiB", 64 << 10)
        counted.plan()
        counted.all_reduce_async()
