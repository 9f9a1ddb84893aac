"""MPICH and Intel MPI: ranks exchange rank 0's address through ``mpiexec``.

The process manager Hydra gives each rank a socket (``PMI_FD``) to its proxy, and keeps a table for
the job. Rank 0 puts its address there, all ranks meet in a barrier, and all read it. The protocol
is PMI-1; see P. Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for
Extreme-Scale Systems" (EuroMPI 2010). MPI uses the same socket with the same protocol, so we must
not disturb it:

* One request and one reply at a time, in whole lines, and the mode of the socket never changes. MPI
  may be initialised before or later.
* Hydra treats a rank that ends without ``finalize`` as crashed, and kills the others. After
  ``finalize``, MPI could not begin. So we send it at the very end, unless MPI will.
* A program started by the rank inherits the variables, but not the socket: the number may belong to
  any other file. So we write only to a socket whose other end is Hydra's proxy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import select
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradring.clusters import mpi, own_host
from gradring.clusters.cluster import Cluster, Environment
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import RendezvousError

RANK, SIZE, FD, LOCAL_SIZE = "PMI_RANK", "PMI_SIZE", "PMI_FD", "MPI_LOCALNRANKS"
#: Variables with ``mpiexec``'s name for this host: MPICH 5, MPICH 4, Intel MPI.
HOST_NAMES = ("PMI_HOSTNAME", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "HYDRA_BSTRAP_LOCALHOST")
PROXY = "hydra_pmi_proxy"
KEY = "gradring-rank-0"
_UCRED = struct.Struct("3i")


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """Returns the cluster around a given address, or around the one that rank 0 has chosen."""
    address, job_id = parse.given_rendezvous(environ) or parse.master_rendezvous(environ), None
    if address is None and place.world_size > 1:
        address, job_id = _agreed(environ, place)
    reason = f"{RANK}={place.rank} and {SIZE}={place.world_size} are set."
    return Cluster.of(place, address, ENVIRONMENT.source, reason, job_id=job_id)


ENVIRONMENT = Environment(
    "PMI",
    (RANK, SIZE, FD, "PMI_PORT", "PMI_ID"),
    lambda environ: parse.place(environ, RANK, SIZE),
    join,
)


def _agreed(environ: Mapping[str, str], place: Place) -> tuple[str, str]:
    """Returns rank 0's address and the job's name, by the socket of this very process."""
    number = parse.value(environ, FD)
    own = all(os.environ.get(name) == environ.get(name) for name in (RANK, SIZE, FD))
    if number is None or not own or not _leads_to_proxy(int(number) if number.isdigit() else -1):
        why = f", and {FD} is no socket to mpiexec in this process"
        raise mpi.unknown_rendezvous(ENVIRONMENT.source, place, why)
    return _exchanged(int(number), place, parse.value(environ, parse.PORT))


@functools.cache  # a key can be put only once
def _exchanged(fd: int, place: Place, port: str | None) -> tuple[str, str]:
    from gradring.config.values import Settings

    deadline = time.monotonic() + Settings.from_environ(os.environ, token=b"-").timeout
    connection = _Connection(fd, place, deadline)
    if not _mpi_is_initialized():
        connection.ask("init", pmi_version="1", pmi_subversion="1")
        atexit.register(connection.end, os.getpid())
    table = connection.ask("get_my_kvsname")["kvsname"]
    if place.rank == 0:
        name = next(filter(None, (parse.value(os.environ, n) for n in HOST_NAMES)), None)
        alone = parse.value(os.environ, LOCAL_SIZE) == str(place.world_size)
        address = own_host.free_address(os.environ, name, alone=alone)
        connection.ask("put", kvsname=table, key=KEY, value=address)
    connection.ask("barrier_in")
    found = connection.ask("get", kvsname=table, key=KEY)
    return parse.address(found.get("value"), "the address from mpiexec"), table


@dataclass
class _Connection:
    """Connection to Hydra's proxy; each request and each reply is a line."""

    _fd: int
    _place: Place
    _deadline: float

    def ask(self, command: str, **words: str) -> dict[str, str]:
        """Sends a request, and returns the fields of the reply."""
        line = " ".join([f"cmd={command}", *(f"{name}={text}" for name, text in words.items())])
        try:
            os.write(self._fd, f"{line}\n".encode())
            answer = self._line(command)
        except RendezvousError:  # is also an OSError
            raise
        except OSError as error:
            raise self._failed(command, str(error)) from error
        found = dict(word.split("=", 1) for word in answer.split() if "=" in word)
        if found.get("rc", "0") != "0":
            raise self._failed(command, answer)
        return found

    def end(self, process_id: int) -> None:
        """Sends ``finalize`` to Hydra, except in a fork and if MPI will send it."""
        if os.getpid() == process_id and not _mpi_is_initialized():
            self._deadline = time.monotonic() + 1
            with contextlib.suppress(RendezvousError):
                self.ask("finalize")

    def _line(self, command: str) -> str:
        # MPI reads from this socket later, so no byte after the line may be read.
        line = b""
        while not line.endswith(b"\n"):
            left_ms = max(0.0, self._deadline - time.monotonic()) * 1000
            waiting = select.poll()
            waiting.register(self._fd, select.POLLIN)
            if not waiting.poll(left_ms):
                raise self._failed(command, "no answer: not all ranks have come this far")
            byte = os.read(self._fd, 1)
            if not byte:
                raise self._failed(command, "mpiexec has closed the connection")
            line += byte
        return line.decode(errors="replace").strip()

    def _failed(self, command: str, problem: str) -> RendezvousError:
        return RendezvousError(
            f"{self._place} cannot ask mpiexec for the address of rank 0 (PMI {command}: "
            f"{problem}); set {parse.RENDEZVOUS} to host:port for all ranks",
            rank=self._place.rank,
            host=socket.gethostname(),
        )


def _leads_to_proxy(fd: int) -> bool:
    """Returns whether ``fd`` is a socket made by Hydra's proxy."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as end:
            if end.family != socket.AF_UNIX:
                return False
            size = _UCRED.size
            maker, _, _ = _UCRED.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return Path(f"/proc/{maker}/comm").read_text().strip() == PROXY
    except (OSError, OverflowError):
        return False


def _mpi_is_initialized() -> bool:
    """Returns whether MPI is initialised, and thus sends ``init`` and ``finalize`` itself."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    for path in set(re.findall(r"\S*/lib\w*mpi\w*\.so\S*", maps)):
        with contextlib.suppress(OSError, AttributeError):
            flag = ctypes.c_int(0)
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD).MPI_Initialized(ctypes.byref(flag))
            if flag.value:
                return True
    return False
