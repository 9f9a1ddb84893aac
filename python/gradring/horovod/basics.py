"""The group that a program of Horovod is in, and what it may ask about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from typing import Protocol, runtime_checkable

import gradring
from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.group.communicator import Communicator, open_groups

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_log = logging.getLogger("gradring")

_communicator: Communicator | None = None
#: Process sets, in the order in which they were connected.
_parts: list[Part] = []


@runtime_checkable
class Part(Protocol):
    """Some of the processes."""

    def _connect(self, communicator: Communicator) -> None:
        """Forms their group."""

    def _disconnect(self) -> None:
        """Closes it; nothing if it is closed."""


def init(
    comm: Sequence[int] | None = None, process_sets: Iterable[Part] | str | None = None
) -> None:
    """Joins the group that the environment describes, as `gradring.init` does.

    Does nothing if this process is in it already.

    Args:
        comm: Nothing but None, the default: the launcher says who is in the group.
        process_sets: What to connect, as by `add_process_set`. ``dynamic`` is nothing so far, and
            has no other effect: process sets may always be added.

    Raises:
        gradring.errors.ConfigError: ``comm`` is given; ``process_sets`` are none; or as
            `gradring.init`.
        gradring.errors.RendezvousError: As `gradring.init`.
        gradring.errors.AuthenticationError: As `gradring.init`.
    """
    global _communicator
    if comm is not None:
        raise ConfigError(
            f"hvd.init(comm={comm!r}): the launcher says which processes are in the group; start "
            "these alone, and call hvd.init() without comm"
        )
    parts = [] if process_sets in (None, "dynamic") else [*process_sets]
    if not all(isinstance(part, Part) for part in parts):
        raise ConfigError(
            f"hvd.init(process_sets={process_sets!r}): pass process sets, such as "
            'hvd.ProcessSet([0, 1]), or "dynamic"'
        )
    if not is_initialized():
        _communicator = gradring.init()
        _name_what_is_hidden(_communicator)
        for part in parts:
            part._connect(_communicator)


def _name_what_is_hidden(communicator: Communicator) -> None:
    """Says on rank 0 which Horovod the program would import if gradring did not take its place."""
    if communicator.rank == 0 and Settings.from_environ().as_horovod:
        installed = PathFinder.find_spec("horovod")
        if installed is not None and installed.origin is not None:
            _log.warning(
                "horovod is gradring's here (GRADRING_AS_HOROVOD); the Horovod in %s is not used",
                installed.origin,
            )


def shutdown() -> None:
    """Leaves the group; `init` may join one again, and connect the same process sets."""
    global _communicator
    group, _communicator = _communicator, None
    for part in _parts:
        part._disconnect()
    _parts.clear()
    if group is not None and group in open_groups:
        group.close()


def keep(part: Part) -> int:
    """Disconnects a process set with the others; returns the number of the set, from 1."""
    _parts.append(part)
    return len(_parts)


def is_initialized() -> bool:
    """Whether this process is in a group."""
    return _communicator is not None and _communicator in open_groups


def communicator() -> Communicator:
    """The group, for gradring's own functions.

    Raises:
        gradring.errors.ConfigError: `init` has not been called, or `shutdown` since.
    """
    if _communicator is None or _communicator not in open_groups:
        raise ConfigError("this process is in no group; call hvd.init() before")
    return _communicator


def rank() -> int:
    """This process's index in the group."""
    return communicator().rank


def size() -> int:
    """How many processes are in the group."""
    return communicator().world_size


def local_rank() -> int:
    """This process's index among those on its host."""
    return communicator().local_rank


def local_size() -> int:
    """How many processes are on this host."""
    return communicator().local_size


def cross_rank() -> int:
    """This process's index among those that have its `local_rank` on their hosts."""
    return _across().index(rank())


def cross_size() -> int:
    """How many hosts have a process of this one's `local_rank`."""
    return len(_across())


def is_homogeneous() -> bool:
    """Whether every host has as many processes as any other."""
    hosts = communicator().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _across() -> list[int]:
    """The ranks that have this one's place on their hosts."""
    hosts = communicator().hosts
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [rank for rank, place in enumerate(places) if place == places[communicator().rank]]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begins to record a timeline; every rank calls it.

    Args:
        file_path: Where `stop_timeline` writes it, on rank 0, in Chrome's trace format.
        mark_cycles: Has no effect: there are no cycles to mark.
    """
    communicator().trace_start(file_path)


def stop_timeline() -> None:
    """Ends the recording and writes the timeline; every rank calls it."""
    communicator().trace_stop()


def mpi_built() -> bool:
    """False: nothing here is MPI, though `mpirun` may start the processes."""
    return False


def mpi_enabled() -> bool:
    """False, as `mpi_built`."""
    return False


def mpi_threads_supported() -> bool:
    """False, as `mpi_built`."""
    return False


def gloo_built() -> bool:
    """True: programs ask whether Horovod needs no MPI. gradring's own core is in Gloo's place."""
    return True


def gloo_enabled() -> bool:
    """True, as `gloo_built`."""
    return True


def nccl_built() -> int:
    """0, the version of an NCCL that is not there: tensors are on CPUs."""
    return 0


def cuda_built() -> bool:
    """False: tensors are on CPUs."""
    return False


def rocm_built() -> bool:
    """False: tensors are on CPUs."""
    return False


def ddl_built() -> bool:
    """False: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's library is not used."""
    return False
