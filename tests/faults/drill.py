"""Drives one cell of the matrix with real processes, and judges what the survivors saw.

The ranks run `actor.act`. On the stage a rank says ``pid-R``, ``ready-R`` when its group has worked
once, and ``done-R`` at its end. The director says ``go`` when all are ready; what strikes says
``struck``, and when. A rank that is stopped for good is ended when all others are done. When all
ranks have ended, the drill is ``over``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from faults import actor, matrix
from faults.actor import Addresses
from faults.matrix import Cell
from faults.proxy import ALL_BITS, Flow, Harm, Proxies, Trap
from faults.stage import Stage
from gradring.machine.ports import free_ports
from gradring.testing import Host, Outcome, run_ranks, simulated_hosts
from support.waiting import SOON_LOST

LIMIT_S = 120.0
RENDEZVOUS_PORTS = itertools.count(20_000)
RATE = "400mbit"
"""Of simulated hosts: a collective takes seconds, so a cut is in its middle."""
INSIDE_A_GREETING = 40
"""A byte of the nonce: what comes before it tells the proxy whose greeting it is."""
INSIDE_A_HEARTBEAT = 4
"""The kind of the message; its length comes before it."""
HEADER_BYTES = 64
MEMBERS = ("data", "control")
"""What connections of a group are for, once its members know each other."""
ONE_BIT = 0x10
CLOSE_LIMIT_S = 5.0
"""Bound for ``close()`` after a failure: a second for the last messages, and a busy machine."""


@dataclass
class Result:
    """What became of a cell."""

    cell: Cell
    problems: list[str]
    noticed_s: float = 0.0
    """From the fault to the last survivor's error, or to the last result."""


def drill(cell: Cell) -> Result:
    """Runs the cell; no problems means that it went as the matrix says."""
    with contextlib.ExitStack() as resources:
        directory = resources.enter_context(tempfile.TemporaryDirectory(prefix="gradring-drill-"))
        stage = Stage(Path(directory))
        hosts: list[Host] = []
        proxies, addresses = None, []
        address = own_address()
        if cell.fault == matrix.CUT:
            hosts = resources.enter_context(simulated_hosts(cell.world_size, rate=RATE))
        elif cell.fault in matrix.BY_PROXY or cell.phase == matrix.HANDSHAKE:
            targets = [(address, port) for port in free_ports(cell.world_size, address)]
            proxies = resources.enter_context(Proxies(targets))
            addresses = addresses_of(targets, proxies)
        director = threading.Thread(target=direct, args=(cell, stage, proxies, hosts))
        director.start()
        arguments = (cell, stage, addresses)
        rendezvous = {"GRADRING_RENDEZVOUS": f"{address}:{next(RENDEZVOUS_PORTS)}"}
        outcomes = run_ranks(
            actor.act,
            cell.world_size,
            *arguments,
            timeout=LIMIT_S,
            env={**SOON_LOST, **({} if hosts else rendezvous)},
            check=False,
            hosts=hosts,
        )
        stage.tell("over")
        director.join()
        return judge(cell, stage, outcomes)


def own_address() -> str:
    """A loopback address that no other drill of this machine uses, in whatever process."""
    pid = os.getpid()
    return f"127.{64 + (pid >> 16) % 64}.{pid >> 8 & 255}.{pid & 255}"


def addresses_of(targets: list[tuple[str, int]], proxies: Proxies) -> list[Addresses]:
    """Rank 0 meets the others at its own port; they come through its proxy."""
    own = [f"{host}:{port}" for host, port in targets]
    return [
        Addresses(proxies.addresses[0] if rank else own[0], own[rank], proxies.addresses[rank])
        for rank in range(len(targets))
    ]


def direct(cell: Cell, stage: Stage, proxies: Proxies | None, hosts: list[Host]) -> None:
    """Lets the drill begin when all are ready, and end when all survivors are done."""
    forming = cell.phase in (matrix.RENDEZVOUS, matrix.HANDSHAKE)
    with contextlib.suppress(TimeoutError):  # then the judge sees who is missing
        if proxies is not None and forming:
            proxies.arm(trap(cell, stage))
        stage.wait(f"pid-{cell.faulty}")
        if not forming:
            stage.wait(*(f"ready-{rank}" for rank in range(cell.world_size)))
        if proxies is not None and not forming:
            proxies.arm(trap(cell, stage))
        stage.tell("go", time.monotonic())
        if cell.fault == matrix.CUT:
            if not forming:
                stage.wait("reached")
            hosts[cell.faulty].cut()
            stage.tell("struck", time.monotonic())
        stage.wait("struck", *(f"done-{rank}" for rank in cell.survivors), within_s=LIMIT_S)
    pid = stage.told(f"pid-{cell.faulty}")
    if cell.fault == matrix.STOPPED and pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


HARMS: dict[str, Harm] = {
    matrix.HUNG: "hang",
    matrix.HALF_OPEN: "half-open",
    matrix.SLOW: "slow",
    matrix.CORRUPTED: "corrupt",
    matrix.TURNED: "corrupt",
    matrix.TRUNCATED: "truncate",
    matrix.DUPLICATED: "duplicate",
}


def trap(cell: Cell, stage: Stage) -> Trap:
    """What the proxies do in this cell, and where."""

    def struck() -> None:
        stage.tell("struck", time.monotonic())

    def signal_faulty() -> None:
        stage.wait(f"pid-{cell.faulty}")
        pid = stage.told(f"pid-{cell.faulty}")
        assert pid is not None
        os.kill(int(pid), actor.HOW_TO_STRIKE)

    def of_faulty(flow: Flow) -> bool:  # either may connect
        return flow.to_responder and cell.faulty in flow.ends and flow.purpose in MEMBERS

    def link(flow: Flow) -> bool:
        if cell.phase == matrix.HANDSHAKE:  # either may connect; the initiator's words are harmed
            pair = {*flow.ends} == {cell.faulty, cell.successor}
            return flow.to_responder and pair and flow.purpose == purpose
        return flow.ends == (cell.faulty, cell.successor) and flow.purpose == purpose

    def joins(flow: Flow) -> bool:
        return flow.to_responder and flow.purpose == "join"

    if cell.fault in matrix.OF_A_PROCESS:
        return Trap("hold", of_faulty, 0, signal_faulty)
    purpose = "control" if cell.phase == matrix.IDLE else "data"
    matches = joins if cell.phase == matrix.RENDEZVOUS else link
    mask = ONE_BIT if cell.fault == matrix.TURNED else ALL_BITS
    return Trap(HARMS[cell.fault], matches, unharmed_bytes(cell), struck, mask)


def unharmed_bytes(cell: Cell) -> int:
    """How much of the faulty rank's link passes before the harm."""
    if cell.phase in (matrix.RENDEZVOUS, matrix.HANDSHAKE):
        return 0 if cell.fault == matrix.DUPLICATED else INSIDE_A_GREETING
    if cell.phase == matrix.IDLE:
        return INSIDE_A_HEARTBEAT
    if cell.fault == matrix.CORRUPTED:
        return 0  # the first byte of the collective's header
    half = 4 * actor.ELEMENTS * (cell.world_size - 1) // cell.world_size
    into = {matrix.FIRST_SEGMENT: 1000, matrix.REDUCE_SCATTER: half // 2}
    return HEADER_BYTES + into.get(cell.phase, half + half // 2)


def judge(cell: Cell, stage: Stage, outcomes: list[Outcome]) -> Result:
    """Compares what the survivors saw with what the matrix says."""
    struck_at = stage.told("struck")
    if struck_at is None:
        return Result(cell, ["the fault did not happen", *map(Outcome.details, outcomes)])
    result = Result(cell, [])
    for outcome in outcomes:
        if outcome.rank not in cell.survivors:
            continue
        seen = outcome.value
        if not outcome.ok or not isinstance(seen, actor.Seen):
            result.problems.append(f"{outcome.summary()}\n{outcome.details()}")
            continue
        result.noticed_s = max(result.noticed_s, seen.ended_at - struck_at)
        result.problems += [
            f"rank {outcome.rank} {problem}" for problem in faults_of(outcome.rank, cell, seen)
        ]
    if cell.within_s is not None and result.noticed_s > cell.within_s:
        late = f"noticed late: {result.noticed_s:.1f} s, more than {cell.within_s} s"
        result.problems.append(late)
    return result


def faults_of(rank: int, cell: Cell, seen: actor.Seen) -> list[str]:
    """What a survivor should not have seen."""
    problems = []
    error = seen.error
    if type(error).__name__ != (cell.error or "NoneType"):
        problems.append(f"got {error!r} instead of {cell.error}")
    elif error is not None and error.rank not in cell.may_blame(rank):
        problems.append(f"blames rank {error.rank}: {error}")
    if not seen.right:
        problems.append("got a wrong result")
    if seen.close_s > CLOSE_LIMIT_S:
        problems.append(f"took {seen.close_s:.1f} s to close")
    if seen.leaks:
        problems.append(f"leaks {', '.join(seen.leaks)}")
    return problems
