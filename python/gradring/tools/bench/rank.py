"""The program of every rank of a benchmark.

Timing: all ranks pass a barrier, then rank 0 measures the time of its own call, as nccl-tests does
for its first rank. The call ends when rank 0 has the whole result. Every rank contributes to the
result, so the time includes late ranks. The barrier comes before every iteration, so that
iterations do not overlap. It is the system's own if it has one: how far apart the ranks leave it is
in the time. All ranks copy the input and check the result outside of the measured
time.

All systems are measured in turns: each round has a share of each system's iterations. So a change
of the machine's speed affects all systems. The other systems sleep meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import gradring
from gradring.config.values import TLS_VARIABLES, Settings, TlsFiles
from gradring.group.communicator import Communicator
from gradring.tools.bench.measurement import P99_ITERATIONS, Measurement
from gradring.tools.bench.options import TLS, Options, native
from gradring.tools.bench.systems import System, load_peer
from gradring.tools.bench.systems.agree import agree_on_addresses, agree_on_ports
from gradring.tools.bench.systems.link import open_link
from gradring.tools.bench.systems.own import own_system
from gradring.tools.bench.systems.system import Reduction
from gradring.tools.bench.values import Problem, dtype_of

#: Many rounds, because the kernel places the ranks differently in each.
ROUNDS = 20
#: Time for the iterations of one system at one size, with their checks.
CELL_S = 3.0
#: Longer limit if the iterations would otherwise be too few for a p99.
P99_LIMIT_S = 60.0
MIN_ITERATIONS, MAX_ITERATIONS = 10, 2000
#: The first iterations trace, allocate and connect; the last few measure the time of one.
WARM_UP_ITERATIONS, PROBES = 5, 3


def measure(options: Options, progress: str | None = None) -> list[Measurement]:
    """Joins the group and measures by the options; all ranks return the same rows.

    Args:
        options: The options.
        progress: A file to which rank 0 appends the rows of each size as they are ready.
    """
    if options.hosts > 1:
        _keep_to_own_cores(int(os.environ["GRADRING_RANK"]) // options.ranks_per_host, options)
    tls = Settings.from_environ().tls
    for name in TLS_VARIABLES:  # the TLS group gets them as an argument
        os.environ.pop(name, None)
    with contextlib.ExitStack() as closing:
        groups, systems = _join(options, tls, closing)
        comm = groups[0]
        for name in options.peers:
            systems.extend(load_peer(name).open_systems(groups, closing))
        systems.extend(open_link(comm, closing))
        rows: list[Measurement] = []
        for size_bytes in options.sizes:
            measured = measure_size(comm, systems, options, size_bytes)
            if progress is not None and comm.rank == 0:
                with Path(progress).open("a") as file:
                    file.write(json.dumps([asdict(row) for row in measured]) + "\n")
            rows.extend(measured)
        comm.barrier()  # some systems print errors if a rank ends early
        return rows


def _keep_to_own_cores(host: int, options: Options) -> None:
    """Gives each simulated host cores of its own, at least one; real hosts share none."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(len(cores) // options.hosts, 1)
    os.sched_setaffinity(0, {cores[(host * count + core) % len(cores)] for core in range(count)})


def _join(
    options: Options, tls: TlsFiles | None, closing: contextlib.ExitStack
) -> tuple[list[Communicator], list[System]]:
    """Joins a group per transport, then each with checksums; the first is the launcher's."""
    systems: list[System] = []
    groups: list[Communicator] = []
    for checksum, transport in itertools.product((False, True), options.transports):
        if checksum and not options.checksum:
            break
        place: dict[str, Any] = {}
        if groups:
            first = groups[0]
            rank_0, (port,) = agree_on_addresses(first)[0], agree_on_ports(first, 1)
            place = {"rank": first.rank, "world_size": first.world_size}
            place["rendezvous"] = f"{rank_0}:{port}"
        comm = gradring.init(
            **place,
            transport=native(transport),
            tls=tls if transport == TLS else None,
            algorithm=options.algorithm,
            checksum=checksum,
        )
        groups.append(closing.enter_context(comm))
        # The transport chosen by auto can be measured under its own name too.
        automatic = transport == "auto" and len(options.transports) > 1
        systems.append(own_system(comm, TLS if transport == TLS else None, automatic=automatic))
    return groups, systems


def measure_size(
    comm: Communicator, systems: Sequence[System], options: Options, size_bytes: int
) -> list[Measurement]:
    """Measures all systems at one size in turns; returns one row each, in their order."""
    count = size_bytes // dtype_of(options.dtype).itemsize
    problem = Problem(comm.rank, comm.world_size, count, options.op, options.dtype)
    prepared = [(system, system.prepare(problem)) for system in systems]
    cells = [_Cell(comm, system, reduction) for system, reduction in prepared if reduction]
    shares = [_iterations_per_round(comm, cell, options.iterations) for cell in cells]
    for number in range(ROUNDS):
        for cell, share in zip(cells, shares, strict=True):
            cell.iterate(share[number])
    return [cell.measurement(problem) for cell in cells]


@dataclass
class _Cell:
    """One system at one size."""

    comm: Communicator
    system: System
    reduction: Reduction
    algorithm: str = ""
    wrong: int = 0
    cpu_s: float = 0.0
    durations_s: list[float] = field(default_factory=list)

    def iterate(self, iterations: int, *, timed: bool = True) -> None:
        barrier = self.system.barrier or self.comm.barrier
        samples = self.reduction.iterate(iterations, barrier)
        self.wrong += samples.wrong
        if timed:
            self.durations_s += samples.durations_s
            self.cpu_s += samples.cpu_s

    def measurement(self, problem: Problem) -> Measurement:
        """Returns the row, equal on all ranks: rank 0's times, and sums over all ranks."""
        durations_s = np.array(self.durations_s)
        self.comm.broadcast(durations_s, name="bench/durations")
        wrong = self.comm.all_reduce(np.array([self.wrong]), name="bench/wrong")
        cpu_s = self.comm.all_reduce(np.array([self.cpu_s]), name="bench/cpu")
        return Measurement.of(
            durations_s.tolist(),
            cpu_s=float(cpu_s[0]),
            system=self.system.name,
            transport=self.system.transport,
            algorithm=self.algorithm,
            world_size=problem.world_size,
            dtype=problem.dtype,
            size_bytes=problem.bytes,
            wrong=int(wrong[0]),
        )


def _iterations_per_round(comm: Communicator, cell: _Cell, wanted: int | None) -> list[int]:
    """Warms the cell up, and divides its iterations among the rounds; rank 0 decides."""
    cell.iterate(WARM_UP_ITERATIONS - PROBES, timed=False)
    one_s = min(_probe(cell) for _ in range(PROBES))
    # Read now, while this system's collective is the last one of its communicator.
    cell.algorithm = cell.system.algorithm()
    total = np.array([affordable(one_s) if wanted is None else wanted])
    comm.broadcast(total, name="bench/iterations")
    quotient, rest = divmod(int(total[0]), ROUNDS)
    return [quotient + (number < rest) for number in range(ROUNDS)]


def _probe(cell: _Cell) -> float:
    start = time.perf_counter()
    cell.iterate(1, timed=False)
    return time.perf_counter() - start


def affordable(one_s: float) -> int:
    """Returns the number of iterations of ``one_s`` seconds each; enough for a p99 if possible."""
    enough = min(P99_ITERATIONS, int(P99_LIMIT_S / one_s))
    return min(max(int(CELL_S / one_s), enough, MIN_ITERATIONS), MAX_ITERATIONS)
