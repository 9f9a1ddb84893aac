"""Ranks that begin as copies of a process that has imported what they need.

That takes 0.4 s of a processor for numpy and pytest, 4 s for TensorFlow; a fork some milliseconds.
Afterwards a rank is what it would be otherwise, but for the order of imports: TensorFlow starts its
threads and draws its seeds when it is first used. Ranks with even numbers and with odd ones are
copies of different templates, so that sets of strings have other orders on them, as on ranks of
users. There is a template for each set of the variables that are read when libraries are loaded.

A test whose ranks have to import all themselves uses the fixture ``fresh_interpreters``.
``run_ranks`` of users never forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from gradring.launch.exec_rank import die_with
from gradring.launch.guardian import Guardian
from gradring.launch.processes import RankProcess, RankProcesses
from gradring.testing.harness import search_path, start_interpreter

__all__ = ["Templates", "serve", "start_interpreter"]

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 18
TEMPLATES_MAX = 6
#: How long a template may take to import TensorFlow and to fork, and then to end.
ANSWER_S, ENDING_S = 120.0, 10.0
#: Read when libraries are loaded; a rank cannot change them any more.
LOADED_WITH = ("TF_", "KERAS_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON", "LD_", "MALLOC_", "GLIBC_")
#: Of these, those that are read later.
READ_LATER = ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS")

_SERVER = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from support.rank_template import serve
paths = serve(int(sys.argv[2]), sys.argv[3] == "tensorflow")
from gradring.testing.worker import main
main(*paths)
"""


class Templates:
    """Of one test process; a context manager that ends them all."""

    def __init__(self) -> None:
        self._templates: dict[object, _Template] = {}

    def start(
        self,
        processes: RankProcesses,
        environ: Mapping[str, str],
        paths: Sequence[str],
        output: BinaryIO,
        tensorflow: bool = False,
    ) -> None:
        """Starts a rank, as ``gradring.testing.harness.start_interpreter`` does."""
        loaded = {
            (name, value)
            for name, value in environ.items()
            if name.startswith(LOADED_WITH) and name not in READ_LATER
        }
        key = frozenset(loaded), int(environ["GRADRING_RANK"]) % 2, tensorflow
        template = self._templates.pop(key, None) or _Template(environ, tensorflow)
        try:
            pid = template.copy(environ, paths, output.fileno())
        except BaseException:
            # Whatever it has answered meanwhile must not be taken for the answer to another.
            template.close()
            raise
        self._templates[key] = template
        for oldest in [*self._templates][:-TEMPLATES_MAX]:
            self._templates.pop(oldest).close()
        processes.add(_Copy(len(processes.ranks), pid, processes.guardian))

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *_: object) -> None:
        for template in self._templates.values():
            template.close()


class _Template:
    """A process that forks when it is told to."""

    def __init__(self, environ: Mapping[str, str], tensorflow: bool) -> None:
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(ANSWER_S)
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call
        # What is of one rank must not be in what all begin with.
        common = {n: v for n, v in environ.items() if not n.startswith("GRADRING_")}
        with its:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _SERVER, json.dumps(search_path()), str(its.fileno())),
                    "tensorflow" if tensorflow else "",
                ],
                env=common,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def copy(self, environ: Mapping[str, str], paths: Sequence[str], output: int) -> int:
        """The process id of a new rank, a child of this process."""
        request = {
            "parent": os.getpid(),
            "environ": dict(environ),
            "directory": os.getcwd(),
            "search_path": search_path(),
            "paths": list(paths),
        }
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [output])
            answer = self._channel.recv(MESSAGE_BYTES)
        except OSError as error:
            raise RuntimeError(f"no answer of the ranks' template: {self._output()}") from error
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError(f"the ranks' template has ended: {self._output()}")
        return int(answer)

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._printed.close()

    def _output(self) -> str:
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace")


class _Copy(RankProcess):
    """A rank on this machine that was forked instead of started."""

    def __init__(self, rank: int, pid: int, guardian: Guardian) -> None:
        self._guardian = guardian
        self.popen = _Child(pid)  # type: ignore[assignment]
        self.group_is_alive = True
        guardian.watch(pid)
        self.rank = rank
        self.host = socket.gethostname()


class _Child:
    """As much of ``subprocess.Popen`` as a rank's process needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def serve(descriptor: int, tensorflow: bool) -> list[str]:
    """Forks a rank for each message; returns in the ranks only, what their ``main`` needs."""
    import numpy as np  # noqa: F401
    import pytest

    import gradring.testing.worker

    _ = gradring.init, pytest.raises
    if tensorflow:
        import tensorflow as tf

        import gradring.tensorflow

        _ = gradring.tensorflow.CustomCollectiveStrategy, tf.keras.Model
    # A collection in a rank would touch all objects of TensorFlow and copy their pages, and so
    # would the end of its interpreter, if nothing else referred to them.
    loaded = [[*vars(module).values()] for module in [*sys.modules.values()]]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(loaded))
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
        if not message:
            os._exit(0)
        (output,) = descriptors
        reading, writing = os.pipe()
        between = os.fork()
        if between:
            os.close(writing)
            os.close(output)
            os.waitpid(between, 0)
            # Now the rank is a child of the process that asked for it.
            channel.send(os.read(reading, 32))
            os.close(reading)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(writing, str(os.getpid()).encode())
        os.close(reading)
        os.close(writing)
        channel.close()
        return _become_rank(json.loads(message), between, output)


def _become_rank(request: dict[str, Any], between: int, output: int) -> list[str]:
    """Makes of a copy of the template, whose parent ends, what a started interpreter would be."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # The signal is for the death of whoever is the parent when it is asked for.
    while os.getppid() == between:
        time.sleep(0.001)
    die_with(request["parent"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    sys.path[:] = request["search_path"]
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    import numpy as np

    random.seed()
    np.random.seed()
    paths: list[str] = request["paths"]
    return paths
