"""The n-th system call of a kind fails on one rank: all ranks finish, or get typed errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradring.machine.ports import free_ports

#: The calls that connections, memory and threads are made of, and how each may fail. An import of
#: numpy makes none of them, so the first is one of a group that forms.
CALLS = {
    "socket": "EMFILE",
    "setsockopt": "ENOPROTOOPT",
    "getsockopt": "ENOTCONN",
    "getsockname": "EBADF",
    "getpeername": "ENOTCONN",
    "bind": "EADDRINUSE",
    "listen": "EADDRINUSE",
    "accept4": "EMFILE",
    "connect": "ECONNREFUSED",
    "sendto": "ECONNRESET",
    "sendmsg": "EPIPE",
    "recvfrom": "ECONNRESET",
    "recvmsg": "ECONNRESET",
    "readv": "ECONNRESET",
    "poll": "ENOMEM",
    "ppoll": "ENOMEM",
    "eventfd2": "EPERM",
    "memfd_create": "EMFILE",
    "fallocate": "ENOSPC",
    "clone3": "EAGAIN",
}
#: A rank makes fewer of each in the program below.
CALLS_MAX = 26
#: How long a rank waits for one that could not form the group.
TIMEOUT_S = 2

PROGRAM = """
import numpy as np
import gradring

try:
    with gradring.init() as comm:
        for count in (1, 1000, 300_000):
            sums = comm.all_reduce(np.full(count, comm.rank + 1.0))
            assert (sums == 3.0).all(), sums
        comm.barrier()
except gradring.errors.GradringError as error:
    print("typed:", type(error).__name__, error.rank)
else:
    print("finished")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace lets system calls fail"),
]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_system_call_that_fails_is_survived_or_a_typed_error(
    tmp_path: Path, call: str, victim: int, transport: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for nth in range(1, CALLS_MAX + 1):
        calls = tmp_path / "calls"
        failing = ["strace", "-f", "-qq", "-o", str(calls), "-e", f"trace={call}"]
        failing += ["-e", f"inject={call}:error={CALLS[call]}:when={nth}"]
        (port,) = free_ports(1)
        ranks = [
            subprocess.Popen(
                [*(failing if rank == victim else []), sys.executable, str(program)],
                env={
                    **os.environ,
                    "GRADRING_RANK": str(rank),
                    "GRADRING_WORLD_SIZE": "2",
                    "GRADRING_RENDEZVOUS": f"127.0.0.1:{port}",
                    "GRADRING_TIMEOUT_S": str(TIMEOUT_S),
                    "GRADRING_TRANSPORT": transport,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (0, 1)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        for rank, output in zip(ranks, said, strict=True):
            last = (output.splitlines() or [""])[-1]
            assert rank.returncode == 0 and last.startswith(("typed: ", "finished")), (nth, said)
        if "INJECTED" not in calls.read_text():
            return
    raise AssertionError(f"there are more than {CALLS_MAX} of {call} on each thread")
