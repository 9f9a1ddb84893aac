"""Programs for jobs with input workers, and what their launcher has started."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import launching

from support.waiting import wait_until

#: Servers and ranks import TensorFlow, on a machine that may be busy.
DEADLINE_S = 240.0
ELEMENTS = 48
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}

HEAD = f"""
import json, os, sys, time
from pathlib import Path
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep
import gradring
from gradring.tensorflow import CustomCollectiveStrategy, distribute_input, input_service
ELEMENTS = {ELEMENTS}
here = Path(sys.argv[0]).parent
strategy = CustomCollectiveStrategy()
comm = strategy.communicator
def until(name):
    while not (here / name).exists(): time.sleep(0.01)
def elements(batches):
    for batch in batches:
        for part in strategy.experimental_local_results(batch):
            yield from part.numpy().tolist()
def of_all(numbers):
    counts = np.bincount(numbers, minlength=ELEMENTS).astype(np.int64)
    return comm.all_reduce(counts).tolist()
"""


def program(directory: Path, text: str, *, head: str = HEAD) -> Path:
    path = directory / "train.py"
    path.write_text(head + text)
    return path


class Launcher:
    """``gradring run`` in the background; its output is in files."""

    def __init__(self, popen: "subprocess.Popen[bytes]", out: IO[str], err: IO[str]) -> None:
        self.popen, self._out, self._err = popen, out, err

    def servers(self, count: int) -> dict[str, int]:
        """The process ids of the dispatcher and the workers that run, by what they are."""
        found: dict[str, int] = {}

        def all_are_there() -> bool:
            assert self.popen.poll() is None, self.stderr()
            found.clear()
            for pid in launching.children_of(self.popen.pid):
                words = command_of(pid)
                if "gradring.launch.input_server" in words:
                    arguments = words[words.index("gradring.launch.input_server") + 1 :]
                    title = f"worker {pid}" if len(arguments) == 3 else "dispatcher"
                    found[title] = pid
            return len(found) == count

        wait_until(all_are_there, f"there are {count} input servers", DEADLINE_S)
        return found

    def wait(self) -> int:
        return self.popen.wait(DEADLINE_S)

    def stdout(self) -> str:
        return Path(self._out.name).read_text()

    def stderr(self) -> str:
        return Path(self._err.name).read_text()


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[Launcher]:
    """A launcher, which a test that fails does not leave behind."""
    environ = {**os.environ, **QUIET}
    with (
        tempfile.NamedTemporaryFile("w+") as out,
        tempfile.NamedTemporaryFile("w+") as err,
        launching.started("run", *arguments, stdout=out, stderr=err, env=environ) as popen,
    ):
        yield Launcher(popen, out, err)


def command_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    return []
