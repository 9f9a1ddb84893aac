"""Drives one cell of the elastic matrix with real processes, and judges what became of the job.

The founders of the job train. After some steps each says ``ready-R`` and waits for ``go``; then the
fault strikes, as in ``faults.drill``, and whoever is left trains on. ``lost-R-N`` says that rank R
has gone back to its last commit for the N-th time. When those that can have made steps without the
rest, one of them says ``come``: then others join in place of the dead, stopped processes go on, and
networks are mended. It is over when the group is as large as it was.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from elastic.matrix import (
    APART,
    DIVIDED,
    ENDS,
    EXIT_CODES,
    FORMING,
    KILLED_AND_STOPPED,
    OF_HOSTS,
    OF_TWO,
    ONE_WAY,
    PAUSED,
    REFUSED,
    SAME,
    Cell,
)
from elastic.training import Job, Plan, Seen, Trainee, at_each_loss, check, outcomes_of
from faults import actor, matrix
from faults.drill import RATE, Result, own_address, trap
from faults.proxy import Proxies
from faults.stage import Stage
from gradring.errors import MismatchError
from gradring.machine.ports import free_ports
from gradring.testing import Host, Outcome, RankTimeout, simulated_hosts
from support.waiting import SOON_LOST

STEPS = 4
ATTEMPTS = 3
MISSED = "the collective was over before its middle was seen"
LIMIT_S = 150.0
"""Silence is noticed twice, and two that could not connect are kept apart for a while."""
STALL_S = 6.0
SILENCE_S = 20.0
"""Longer than any conversation while a group forms takes."""
PORT = 29_500
NOWHERE = "02:00:00:00:00:01"
"""No host of the switch has this address, so what is sent there is lost."""


def drill(cell: Cell) -> Result:
    """Runs the cell; no problems means that it went as the matrix says.

    Again, if the faulty process got no processor time in the middle of its collective.
    """
    for _ in range(ATTEMPTS):
        result = attempt(cell)
        if not any(MISSED in problem for problem in result.problems):
            break
    return result


def attempt(cell: Cell) -> Result:
    """Runs the cell once."""
    with contextlib.ExitStack() as resources:
        directory = resources.enter_context(tempfile.TemporaryDirectory(prefix="gradring-drill-"))
        stage = Stage(Path(directory))
        hosts: list[Host] = []
        proxies = None
        listens: list[str] = []
        if cell.fault in OF_HOSTS:
            rate = None if cell.phase == matrix.IDLE else RATE
            hosts = resources.enter_context(simulated_hosts(cell.world_size, rate=rate))
            addresses = [f"{host.address}:{PORT}" for host in hosts]
        else:
            own = own_address()
            targets = [(own, port) for port in free_ports(cell.world_size, own)]
            listens = [f"{host}:{port}" for host, port in targets]
            proxies = resources.enter_context(Proxies(targets))
            addresses = proxies.addresses
        plan = Plan(
            functools.partial(act, cell=cell),
            cell.world_size,
            tuple(addresses),
            listens=tuple(listens),
            settings=settings(cell),
            joiners={"checksum": True} if cell.outcome == REFUSED else {},
            at_end=functools.partial(end, cell=cell),
        )
        director = threading.Thread(target=direct, args=(cell, stage, proxies, hosts))
        director.start()
        joiners = 1 if cell.outcome == REFUSED else len(cell.ended)
        try:
            outcomes = outcomes_of(
                plan, stage, joiners, hosts=hosts, env=SOON_LOST, limit_s=LIMIT_S
            )
        except RankTimeout as error:
            return Result(cell, [str(error)])
        finally:
            director.join()
        return judge(cell, plan, stage, outcomes)


def settings(cell: Cell) -> dict[str, object]:
    """Those of the group."""
    given: dict[str, object] = {
        "transport": cell.transport,
        "algorithm": "ring",
        "checksum": cell.fault == matrix.TURNED,
    }
    if cell.error == "CollectiveTimeoutError":
        given["stall_timeout"] = STALL_S
    return given


def act(trainee: Trainee, cell: Cell) -> bool:
    """What each process does before each step; returns whether it has seen enough."""
    comm, stage, place = trainee.comm, trainee.stage, trainee.place
    if comm.generation == 1 and trainee.state.step == STEPS:
        note_losses(trainee)
        if place in cell.strikers:
            signal.signal(actor.HOW_TO_STRIKE, lambda *_: strike(cell, stage, place))
        stage.tell(f"ready-{place}")
        stage.wait("go")
        meet(trainee, cell)
    has_struck = cell.phase == matrix.SHUTDOWN or stage.told("struck") is not None
    has_worked = trainee.steps_here >= STEPS and has_struck
    if has_worked and comm.generation > 1 and comm.world_size >= cell.left and comm.rank == 0:
        stage.tell("come")
    if cell.outcome == REFUSED and stage.told(f"ended-{cell.world_size}") is None:
        return False
    is_next = comm.generation > 1
    if cell.outcome == SAME and cell.phase not in FORMING:
        is_next = trainee.steps_here >= 2 * STEPS
    return has_worked and is_next and comm.world_size == cell.world_size


def note_losses(trainee: Trainee) -> None:
    """Says each time that this process goes back to its last commit."""
    count = itertools.count(1)
    at_each_loss(lambda: trainee.stage.tell(f"lost-{trainee.place}-{next(count)}"))


def strike(cell: Cell, stage: Stage, place: int) -> None:
    """Ends this process, or stops it until another one lets it go on."""
    how = cell.fault
    if how in OF_TWO:
        how = matrix.KILLED if place in cell.ended else matrix.STOPPED
    if how not in (matrix.STOPPED, PAUSED):
        actor.strike(how, stage)
    stage.tell("struck", time.monotonic())
    os.kill(os.getpid(), signal.SIGSTOP)


def meet(trainee: Trainee, cell: Cell) -> None:
    """Lets the fault strike in its phase."""
    comm, stage, place = trainee.comm, trainee.stage, trainee.place
    strikes = place in cell.strikers
    is_cut = place == cell.faulty and cell.fault in OF_HOSTS

    def strike_here() -> None:
        if strikes:
            strike(cell, stage, place)
        elif is_cut:
            stage.tell("reached")
            stage.wait("struck")

    if cell.phase == matrix.RENDEZVOUS:
        if cell.outcome == REFUSED and place == 0:
            stage.tell("come")
            stage.tell("struck", time.monotonic())
        before_the_next_group(strike_here)
    if cell.phase in FORMING and cell.outcome != REFUSED:
        if place == cell.successor:
            comm.abort("as planned")
    elif cell.phase == matrix.IDLE:
        strike_here()
        stage.wait("struck")
    elif cell.phase in matrix.MOVING:
        x = np.full(actor.ELEMENTS, place + 1.0, np.float32)
        total = comm.world_size * (comm.world_size + 1) / 2
        if strikes and place != cell.faulty:
            started = comm.all_reduce_async(x, name="large")
            stage.wait("struck")
            strike_here()
            started.wait()
        elif strikes or is_cut:
            started = actor.reach(cell, comm, x, total)
            if started.done():
                stage.tell("missed")
            strike_here()
            started.wait()
        elif cell.fault == matrix.WRONG_PROGRAM and place == cell.faulty:
            stage.tell("struck", time.monotonic())
            comm.all_reduce(x[1:], name="large")
        else:
            comm.all_reduce(x, name="large")
        assert (x == total).all(), "a sum is wrong"


def before_the_next_group(strike_here: Callable[[], None]) -> None:
    """Has it called once this process has agreed on the next group with others."""
    real = Job.agreed

    def agreed(*arguments: object) -> None:
        Job.agreed = real
        strike_here()
        real(*arguments)

    Job.agreed = agreed


def end(trainee: Trainee, cell: Cell) -> None:
    """What each process does when it has trained to the end."""
    if cell.phase == matrix.SHUTDOWN and trainee.place == cell.faulty:
        strike(cell, trainee.stage, trainee.place)


def direct(cell: Cell, stage: Stage, proxies: Proxies | None, hosts: Sequence[Host]) -> None:
    """Harms connections and networks when all are ready, and mends what can be mended."""
    with contextlib.suppress(TimeoutError):  # then the judge sees who is missing
        stage.wait(*(f"ready-{rank}" for rank in range(cell.world_size)))
        by_proxy = cell.fault in matrix.BY_PROXY or cell.phase == matrix.HANDSHAKE
        if proxies is not None and by_proxy:
            harm = trap(cell, stage)
            forming = cell.phase in FORMING
            matches = harm.matches
            # The first group, whose generation is 0 in greetings, is whole by now.
            proxies.arm(replace(harm, matches=lambda it: it.generation >= forming and matches(it)))
        stage.tell("go")
        if hosts:
            stage.wait("reached")
            lose_packets(cell, hosts)
            stage.tell("struck", time.monotonic())
        stage.wait("struck", within_s=LIMIT_S)
        if cell.phase == matrix.SHUTDOWN:
            others = set(range(cell.world_size)) - {cell.faulty}
            stage.wait(*(f"ended-{rank}" for rank in others))
        elif cell.silent or cell.fault == PAUSED:
            if cell.fault != PAUSED and cell.can_go_on:
                stage.wait("come", within_s=LIMIT_S)
            elif cell.phase in FORMING:
                # Who has not agreed on the second group yet has not lost it.
                with contextlib.suppress(TimeoutError):
                    stage.wait(*lost(cell, 2), within_s=SILENCE_S)
            else:
                stage.wait(*lost(cell, 1), within_s=LIMIT_S)
    for host in hosts:
        for other in hosts:
            neighbour(host, "del", other)
    if cell.fault in (matrix.STOPPED, PAUSED, KILLED_AND_STOPPED):
        both = cell.fault == KILLED_AND_STOPPED
        pid = int(stage.told(f"pid-{cell.successor if both else cell.faulty}") or 0)
        how = signal.SIGKILL if cell.phase == matrix.SHUTDOWN else signal.SIGCONT
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while stage.told("over") is None and not is_stopped(pid):
                time.sleep(0.01)
            os.kill(pid, how)


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def lost(cell: Cell, times: int) -> Iterable[str]:
    """What is told when all that are left have noticed so many losses."""
    # Who cannot be heard by others may hear them.
    left = set(range(cell.world_size)) - cell.ended - cell.silent - {cell.faulty}
    return [f"lost-{rank}-{times}" for rank in left]


def lose_packets(cell: Cell, hosts: Sequence[Host]) -> None:
    """From now on packets are lost between some hosts; no process is told."""
    for sender in range(cell.world_size):
        for receiver in set(range(cell.world_size)) - {sender}:
            ends = {sender, receiver}
            is_lost = {
                matrix.CUT: cell.faulty in ends,
                APART: ends == {cell.faulty, cell.successor},
                ONE_WAY: sender == cell.faulty,
                DIVIDED: len(ends & cell.silent) == 1,
            }
            if is_lost[cell.fault]:
                neighbour(hosts[sender], "replace", hosts[receiver])


def neighbour(host: Host, what: str, other: Host) -> None:
    """Lets a host send to where another one is not, or no longer."""
    ends = ("lladdr", NOWHERE, "nud", "permanent") if what == "replace" else ()
    command = host.command("ip", "neigh", what, other.address, "dev", "eth0", *ends)
    subprocess.run(command, check=what == "replace", capture_output=True)


def judge(cell: Cell, plan: Plan, stage: Stage, outcomes: list[Outcome]) -> Result:
    """Compares what became of the processes with what the matrix says."""
    struck_at = stage.told("struck")
    if struck_at is None:
        return Result(cell, ["the fault did not happen", *map(Outcome.details, outcomes)])
    if stage.told("missed") is not None:
        return Result(cell, [MISSED])
    problems: list[str] = []
    trained = []
    for outcome in outcomes:
        wrong = problem_of(cell, outcome)
        if wrong is not None:
            problems.append(f"{wrong}: {outcome.summary()}\n{outcome.details()}")
        elif outcome.ok:
            trained.append(outcome)
    if problems or not trained:
        return Result(cell, problems)
    try:
        at_end = {cell.faulty} if cell.phase == matrix.SHUTDOWN else ()
        found = check(plan, trained, absent=frozenset(at_end))
        check_one_ring(found)
    except AssertionError as error:
        return Result(cell, [str(error), *map(Outcome.details, outcomes)])
    return Result(cell, [], goes_on_after(cell, struck_at, found))


def problem_of(cell: Cell, outcome: Outcome) -> str | None:
    """What is wrong with the end of a process."""
    place = outcome.rank
    ends = place == cell.faulty if cell.phase == matrix.SHUTDOWN else place in cell.ended
    if ends and cell.fault in (*EXIT_CODES_AT_END, *EXIT_CODES):
        code = {**EXIT_CODES, **EXIT_CODES_AT_END}[cell.fault]
        return None if outcome.exit_code == code else f"should have ended with {code}"
    if cell.outcome == ENDS:
        is_right = isinstance(outcome.exception, MismatchError)
        return None if is_right else "should have got a MismatchError"
    if cell.outcome == REFUSED and place >= cell.world_size:
        is_right = "checksum" in str(outcome.exception)
        return None if is_right else "should have been told what differs"
    return None if outcome.ok else "should have trained to the end"


EXIT_CODES_AT_END = {matrix.STOPPED: -signal.SIGKILL}
"""Who is stopped when all others have left is ended."""


def check_one_ring(found: Sequence[Seen]) -> None:
    """No group made a step that began when a later one had made one."""
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}
    sizes: dict[int, int] = {}
    for seen in found:
        for generation, (ended, began) in seen.times.items():
            firsts[generation] = min(ended, firsts.get(generation, ended))
            lasts[generation] = max(began, lasts.get(generation, began))
        for group in seen.groups:
            assert sizes.setdefault(group.generation, group.world_size) == group.world_size
    for generation, last in lasts.items():
        for later, first in firsts.items():
            assert later <= generation or last < first, f"{generation} goes on beside {later}"


def goes_on_after(cell: Cell, struck_at: float, found: Sequence[Seen]) -> float:
    """Seconds from the fault to the first step of all that were left."""
    least = 2 if cell.outcome != SAME or cell.phase in FORMING else 1
    ends = [
        ended
        for seen in found
        for generation, (ended, _) in seen.times.items()
        if generation >= least and ended > struck_at
    ]
    return max(0.0, min(ends, default=struck_at) - struck_at)
