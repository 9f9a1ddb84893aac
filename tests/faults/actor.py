"""The program of each rank of a drill: the faulty one ends, the others report theirs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

import gradring
from faults import matrix
from faults.matrix import Cell
from faults.stage import Stage
from support.proc import descriptors

HOW_TO_STRIKE = signal.SIGUSR2
"""Makes the faulty rank strike wherever it is."""
ELEMENTS = 1 << 24
"""64 MiB of float32: a collective takes much longer than it takes to look how far it is."""
LOOK_S = 0.0001
PAUSE_S = 0.05
LEAK_LIMIT_S = 6.0
"""How long what belongs to a group that has ended may take to disappear."""


@dataclass(frozen=True)
class Addresses:
    """Where one rank listens and is found, where that is not the harness' choice."""

    rendezvous: str
    listen: str
    announce: str


@dataclass
class Seen:
    """What a rank that was not at fault saw."""

    error: gradring.errors.GradringError | None = None
    ended_at: float = 0.0
    """When it had its error or its result, on the system-wide monotonic clock."""
    close_s: float = 0.0
    right: bool = True
    """Whether all results that it got were right."""
    leaks: list[str] = field(default_factory=list)


def act(cell: Cell, stage: Stage, addresses: list[Addresses]) -> Seen:
    """Plays this rank's part; see `drill` for who tells what on the stage."""
    rank = int(os.environ["GRADRING_RANK"])
    before = belongings()
    if rank == cell.faulty:
        signal.signal(HOW_TO_STRIKE, lambda *_: strike(cell.fault, stage))
    stage.tell(f"pid-{rank}", os.getpid())
    if rank == cell.faulty and cell.phase == matrix.RENDEZVOUS:
        miss(cell, stage)
    seen = Seen()
    see(cell, stage, addresses[rank] if addresses else None, seen)
    seen.leaks = leaks(before)
    stage.tell(f"done-{rank}")
    return seen


def miss(cell: Cell, stage: Stage) -> None:
    """Fails before this rank has joined."""
    if cell.fault in STRIKES:
        strike(cell.fault, stage)
    if cell.fault == matrix.WRONG_PROGRAM:
        os.environ["GRADRING_WORLD_SIZE"] = str(cell.world_size + 1)
        stage.tell("struck", time.monotonic())
    if cell.fault == matrix.CUT:
        stage.wait("struck")


def see(cell: Cell, stage: Stage, addresses: Addresses | None, seen: Seen) -> None:
    """Joins, works, and leaves; writes down how that ended."""
    comm = None
    try:
        comm = join(cell, addresses)
        work(cell, comm, stage, seen)
    except gradring.errors.GradringError as error:
        # Without the frames, which keep the communicator alive.
        seen.error = error.with_traceback(None)
    seen.ended_at = time.monotonic()
    if comm is not None:
        comm.close()
    seen.close_s = time.monotonic() - seen.ended_at


def join(cell: Cell, addresses: Addresses | None) -> gradring.Communicator:
    given = {} if addresses is None else vars(addresses)
    return gradring.init(
        transport=cell.transport,
        timeout=cell.timeout_s,
        stall_timeout=cell.timeout_s,
        algorithm="ring",
        checksum=cell.fault == matrix.TURNED,
        **given,
    )


def work(cell: Cell, comm: gradring.Communicator, stage: Stage, seen: Seen) -> None:
    """Works until the fault ends it."""
    total = comm.world_size * (comm.world_size + 1) / 2
    x = np.full(ELEMENTS, comm.rank + 1.0, np.float32)
    seen.right &= bool(comm.all_reduce(np.full(9, comm.rank + 1.0))[8] == total)
    stage.tell(f"ready-{comm.rank}")
    stage.wait("go")
    if comm.rank == cell.faulty:
        come_to_an_end(cell, comm, stage, x, total)
    if cell.phase == matrix.SHUTDOWN:
        return
    if cell.phase == matrix.IDLE:
        stage.wait("struck")
    seen.right &= bool((comm.all_reduce(x, name="large") == total).all())
    while cell.error is not None:  # if it never comes, the drill ends by its own limit
        if strikes_in_a_collective(cell):
            comm.all_reduce(x, name="large")
        else:
            comm.barrier()  # the connection that fails may be one that a collective does not need
            time.sleep(PAUSE_S)


def come_to_an_end(
    cell: Cell, comm: gradring.Communicator, stage: Stage, x: NDArray[np.float32], total: float
) -> None:
    """Strikes in the right phase, if the fault is one of this process."""
    if cell.fault == matrix.WRONG_PROGRAM:
        stage.tell("struck", time.monotonic())
        comm.all_reduce(x[1:], name="large")
    if cell.fault not in (matrix.CUT, *STRIKES):
        return
    started = None
    if strikes_in_a_collective(cell):
        started = reach(cell, comm, x, total)
        while started.done():  # on a busy machine its middle went by unseen: in the next one
            x.fill(comm.rank + 1.0)
            started = reach(cell, comm, x, total)
    if cell.fault == matrix.CUT:
        stage.tell("reached")
        if started is not None:
            started.wait()
        return
    if cell.fault == "exception":
        with comm:
            strike(cell.fault, stage)
    strike(cell.fault, stage)


def strikes_in_a_collective(cell: Cell) -> bool:
    """Whether the faulty rank watches its own progress: all repeat the collective until then."""
    return cell.fault in (matrix.CUT, *STRIKES) and cell.phase in matrix.MOVING


def reach(
    cell: Cell, comm: gradring.Communicator, x: NDArray[np.float32], total: float
) -> gradring.group.collectives.Work[NDArray[np.float32]]:
    """Starts the collective and returns in the middle of it, as its own buffer shows, or later.

    In step k of the ring's reduce-scatter a rank receives chunk ``rank - k - 2``, and in step k of
    its all-gather chunk ``rank - k - 1``.
    """
    chunk = ELEMENTS // comm.world_size
    step = 0 if cell.phase == matrix.FIRST_SEGMENT else (comm.world_size - 1) // 2
    behind = step + (1 if cell.phase == matrix.ALL_GATHER else 2)
    place = (comm.rank - behind) % comm.world_size * chunk
    if cell.phase != matrix.FIRST_SEGMENT:
        place += chunk // 2
    own = x[place].item()
    started = comm.all_reduce_async(x, name="large")
    while x[place] != total if cell.phase == matrix.ALL_GATHER else x[place] == own:
        time.sleep(LOOK_S)
    return started


def strike(fault: str, stage: Stage) -> NoReturn:
    """Ends this process, or stops it until it is ended."""
    stage.tell("struck", time.monotonic())
    if isinstance(how := STRIKES[fault], signal.Signals):
        os.kill(os.getpid(), how)
    elif how is SystemExit:
        sys.exit(3)
    else:
        raise RuntimeError("the data set is gone")
    raise AssertionError("a signal did not end this process")


STRIKES: dict[str, signal.Signals | type[BaseException]] = {
    matrix.KILLED: signal.SIGKILL,
    matrix.STOPPED: signal.SIGSTOP,
    matrix.RAISED: RuntimeError,
    matrix.EXITED: SystemExit,
}
"""What ends or stops a process, by fault."""


def belongings() -> dict[str, int]:
    """How many threads, mappings and descriptors this process has that could be a group's."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    names = [name for name in names if name.startswith("gradring")]
    for line in Path("/proc/self/maps").read_text().splitlines():
        names += ["memory" for word in line.split() if word.startswith("/memfd:")]
    for target in descriptors():
        names += [kind for kind in ("socket", "eventfd", "memfd") if kind in target]
    return {name: names.count(name) for name in set(names)}


def leaks(before: dict[str, int], spare: Mapping[str, int] | None = None) -> list[str]:
    """What there is more of than before, and stays; ``spare``, so many more may stay."""
    allowed = Counter(before) + Counter(spare or {})
    deadline = time.monotonic() + LEAK_LIMIT_S
    while True:
        left = [f"{count} {name}" for name, count in belongings().items() if count > allowed[name]]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
