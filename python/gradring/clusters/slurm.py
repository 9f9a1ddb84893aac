"""Slurm step: ``srun -n 16 python train.py`` needs no other setting.

Only steps are detected. A batch script or an ``salloc`` shell has many of the same variables, but
is a single process. ``mpirun`` starts its daemons as a step, whose tasks are not the ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gradring.clusters.cluster import Cluster, Environment
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

STEP, RANK, STEP_SIZE, SIZE = (
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)
NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
NODE_COUNTS = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
JOBS = ("SLURM_JOB_ID", "SLURM_JOBID")
# Each component of a heterogeneous job has its own id, and all have this one.
HETEROGENEOUS_JOB = "SLURM_HET_JOB_ID"

# Ids of the batch script, the interactive shell and other steps of one process.
FIRST_RESERVED_STEP = 0xFFFF_FFF0
# Set by mpirun (Open MPI) and mpiexec (MPICH, Intel MPI), which place ranks themselves.
MPI_LAUNCHED = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALRANKID", "PMI_SIZE"))
# Above the ports that Linux uses for outgoing connections (32768 to 60999).
FIRST_PORT, PORT_COUNT = 61440, 4096
# Consecutive jobs have consecutive ids; the stride separates their steps' ports.
STEP_STRIDE = 131
MAX_HOSTS = 65536


def place(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of this task in a step of at least two tasks."""
    step = parse.value(environ, STEP)
    if step is None or _is_started_by_mpi(environ):
        return None
    if parse.whole_number(step, STEP) >= FIRST_RESERVED_STEP:
        return None
    size_name = STEP_SIZE if parse.value(environ, STEP_SIZE) else SIZE
    found = parse.place(environ, RANK, size_name)
    return None if found is None or found.world_size == 1 else found


def _is_started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Returns whether MPI's launcher started this process as one of several."""
    return any(
        parse.value(environ, rank) is not None and parse.value(environ, size) != "1"
        for rank, size in MPI_LAUNCHED
    )


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """Returns the cluster around the step's first node, at a port that all tasks derive."""
    _, job = _first(environ, JOBS)
    given = parse.given_rendezvous(environ)
    cluster = Cluster.of(
        place,
        given or _rendezvous(environ),
        ENVIRONMENT.source,
        f"this is task {place.rank} of {place.world_size} of step {environ[STEP]} "
        f"of Slurm job {job}.",
        job_id=f"slurm {parse.value(environ, HETEROGENEOUS_JOB) or job}.{environ[STEP]}",
    )
    return cluster if given else replace(cluster, candidates=_candidates(environ))


ENVIRONMENT = Environment("Slurm step", (STEP, RANK, STEP_SIZE, SIZE), place, join)


def advice(environ: Mapping[str, str]) -> str | None:
    """Returns advice for a batch script or shell that trains alone in a larger allocation."""
    if parse.value(environ, STEP) is not None:
        return None
    for name in (SIZE, *NODE_COUNTS):
        number = parse.value(environ, name)
        if number not in (None, "1"):
            return f"{name}={number}, but this is no Slurm step; srun would start {number} ranks."
    return None


def expand_nodelist(text: str, name: str = NODELISTS[0]) -> list[str]:
    """Returns the hosts of a Slurm node list: ``gpu[01-02,7],login`` has gpu01, gpu02, gpu7, login.

    Args:
        text: List as Slurm writes it; several brackets in one name multiply.
        name: Variable with the list, for messages.

    Raises:
        ConfigError: The list is malformed, empty or longer than 65536 hosts.
    """
    hosts = list(itertools.islice(_hosts(text.strip(), name), MAX_HOSTS + 1))
    if not hosts or len(hosts) > MAX_HOSTS:
        raise ConfigError(f"{name}={text!r} does not name between 1 and {MAX_HOSTS} hosts")
    return hosts


def _hosts(text: str, name: str) -> Iterator[str]:
    for entry in re.split(r",(?![^\[]*\])", text):
        parts = re.split(r"\[([^\[\]]*)\]", entry)
        if not entry or any(bracket in part for part in parts[::2] for bracket in "[] "):
            raise ConfigError(f"{name}={text!r} is not a Slurm node list such as node[01-03]")
        choices = [
            _numbers(part, text, name) if odd else (part,)
            for odd, part in zip(itertools.cycle((False, True)), parts, strict=False)
        ]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f"{name}={text!r} has the range {item!r}, which is not low-high")
        low, high = int(match[1]), int(match[2] or match[1])
        if high - low >= MAX_HOSTS:
            raise ConfigError(f"{name}={text!r} has a range of more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers


def _rendezvous(environ: Mapping[str, str]) -> str:
    nodes_name, nodes = _first(environ, NODELISTS)
    job_name, job = _first(environ, JOBS)
    job_id, step_id = parse.whole_number(job, job_name), int(environ[STEP])
    derived = FIRST_PORT + (job_id + STEP_STRIDE * step_id) % PORT_COUNT
    port = parse.first_port(environ, derived)
    # Slurm puts task 0 on the first node of the step, except in an arbitrary layout.
    return parse.joined_address(expand_nodelist(nodes, nodes_name)[0], port)


def _candidates(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the ports of ``GRADRING_PORT`` on all nodes; each task takes one that is free."""
    text = parse.value(environ, parse.PORT)
    if text is None:
        return ()
    first, last = parse.ports(text, parse.PORT)
    name, nodes = _first(environ, NODELISTS)
    hosts = expand_nodelist(nodes, name)
    places = itertools.product(hosts, range(first, last + 1))
    return tuple(itertools.starmap(parse.joined_address, places))


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    for name in names:
        text = parse.value(environ, name)
        if text is not None:
            return name, text
    raise ConfigError(
        f"{STEP} is set but {names[0]} is not; start with srun, or set GRADRING_RANK, "
        "GRADRING_WORLD_SIZE and GRADRING_RENDEZVOUS"
    )
