"""The group of a Horovod program, and functions about it."""

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
#: Connected process sets, in the order of their connection.
_parts: list[Part] = []


@runtime_checkable
class Part(Protocol):
    """A process set, as `init` and `shutdown` use it."""

    def _connect(self, communicator: Communicator) -> None:
        """Forms the group of its processes."""

    def _disconnect(self) -> None:
        """Closes the group of its processes; does nothing if it is closed."""


def init(
    comm: Sequence[int] | None = None, process_sets: Iterable[Part] | str | None = None
) -> None:
    """Joins the group described by the environment, as `gradring.init` does.

    Does nothing if this process has already joined it.

    Args:
        comm: Must be None: the launcher decides which processes are in the group.
        process_sets: Process sets to connect, as by `add_process_set`. ``dynamic`` connects none
            and has no further effect, since process sets can always be added.

    Raises:
        gradring.errors.ConfigError: ``comm`` is given; ``process_sets`` has other objects; or as in
            `gradring.init`.
        gradring.errors.RendezvousError: As in `gradring.init`.
        gradring.errors.AuthenticationError: As in `gradring.init`.
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
    """Warns on rank 0 of an installed Horovod that gradring replaces."""
    if communicator.rank == 0 and Settings.from_environ().as_horovod:
        installed = PathFinder.find_spec("horovod")
        if installed is not None and installed.origin is not None:
            _log.warning(
                "horovod is gradring's here (GRADRING_AS_HOROVOD); the Horovod in %s is not used",
                installed.origin,
            )


def shutdown() -> None:
    """Leaves the group; `init` can join one again and connect the same process sets."""
    global _communicator
    group, _communicator = _communicator, None
    for part in _parts:
        part._disconnect()
    _parts.clear()
    if group is not None and group in open_groups:
        group.close()


def keep(part: Part) -> int:
    """Registers a process set for `shutdown`; returns its number, from 1."""
    _parts.append(part)
    return len(_parts)


def is_initialized() -> bool:
    """Returns True if this process is in a group."""
    return _communicator is not None and _communicator in open_groups


def communicator() -> Communicator:
    """Returns the group's communicator, for gradring's own functions.

    Raises:
        gradring.errors.ConfigError: `init` has not been called, or `shutdown` was called after it.
    """
    if _communicator is None or _communicator not in open_groups:
        raise ConfigError("this process is in no group; call hvd.init() before")
    return _communicator


def rank() -> int:
    """Returns this process's index in the group."""
    return communicator().rank


def size() -> int:
    """Returns the number of processes in the group."""
    return communicator().world_size


def local_rank() -> int:
    """Returns this process's index among those on its host."""
    return communicator().local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return communicator().local_size


def cross_rank() -> int:
    """Returns this process's index among the processes with the same `local_rank`."""
    return _across().index(rank())


def cross_size() -> int:
    """Returns the number of hosts with a process of this `local_rank`."""
    return len(_across())


def is_homogeneous() -> bool:
    """Returns True if every host has the same number of processes."""
    hosts = communicator().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def _across() -> list[int]:
    """Returns the ranks with the same local rank as this one."""
    hosts = communicator().hosts
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [rank for rank, place in enumerate(places) if place == places[communicator().rank]]


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts recording a timeline; every rank calls it.

    Args:
        file_path: The file that `stop_timeline` writes on rank 0, in Chrome's trace format.
        mark_cycles: Has no effect: there are no cycles to mark.
    """
    communicator().trace_start(file_path)


def stop_timeline() -> None:
    """Ends the recording and writes the timeline; every rank calls it."""
    communicator().trace_stop()


def mpi_built() -> bool:
    """Returns False: gradring does not use MPI, even if `mpirun` starts the processes."""
    return False


def mpi_enabled() -> bool:
    """Returns False, as `mpi_built` does."""
    return False


def mpi_threads_supported() -> bool:
    """Returns False, as `mpi_built` does."""
    return False


def gloo_built() -> bool:
    """Returns True, which tells programs that MPI is not needed; gradring's core replaces Gloo."""
    return True


def gloo_enabled() -> bool:
    """Returns True, as `gloo_built` does."""
    return True


def nccl_built() -> int:
    """Returns 0 for no NCCL: tensors are on CPUs."""
    return 0


def cuda_built() -> bool:
    """Returns False: tensors are on CPUs."""
    return False


def rocm_built() -> bool:
    """Returns False: tensors are on CPUs."""
    return False


def ddl_built() -> bool:
    """Returns False: IBM's library is not used."""
    return False


def ccl_built() -> bool:
    """Returns False: Intel's library is not used."""
    return False
