"""The fault matrix goes on: a group has failed, and then it re-forms and takes in another process.

The faults are those of a process in ``faults.matrix``. What harms connections alone is left out:
both ends of a link live, so who is left is a matter of chance.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path

import pytest

from elastic.training import Trainee, check, outcomes_of, planned
from faults.matrix import ALL_GATHER, BOTH, EXITED, IDLE, KILLED, RAISED, ROWS
from faults.stage import Stage

STEPS = 4
ELEMENTS = 200_000
#: An all-reduce of so many elements takes about a millisecond.
MOVING_S = 0.0005
EXIT_CODES = {KILLED: -9, EXITED: 3, RAISED: 1}


class Failure(Exception):
    """Of the program."""


def act(trainee: Trainee, fault: str, phase: str, faulty: int) -> bool:
    """Lets one process fail, calls another one, and goes on until the group is as large again."""
    generation, state = trainee.comm.generation, trainee.state
    if trainee.place == faulty and generation == 1 and state.step == STEPS:
        if phase == ALL_GATHER:
            threading.Timer(MOVING_S, fail, [trainee, fault]).start()
        else:
            fail(trainee, fault)
    if generation > 1 and trainee.comm.rank == 0 and not trainee.memory:
        trainee.memory["called"] = True
        trainee.stage.tell("come")
    whole = trainee.comm.world_size == trainee.plan.founders
    return generation > 2 and whole and trainee.steps_here >= STEPS


def fail(trainee: Trainee, fault: str) -> None:
    """Ends the process, in any thread."""
    if fault == KILLED:
        trainee.die()
    if fault == RAISED:
        raise Failure("as planned")
    if threading.current_thread() is threading.main_thread():
        sys.exit(EXIT_CODES[EXITED])
    os._exit(EXIT_CODES[EXITED])


def cells() -> list[tuple[str, str, str, int]]:
    """Faults of a process, when, over what, of how many."""
    faults = {row.fault: row.phases for row in ROWS if row.fault in EXIT_CODES and row.error}
    return [
        (fault, phase, transport, size)
        for fault in faults
        for phase in (IDLE, ALL_GATHER)
        # An exception in the middle of a collective is the program's only after it.
        if (fault, phase) != (RAISED, ALL_GATHER)
        for transport in BOTH
        for size in (2, 3, 4, 5)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "phase", "transport", "size"), cells())
def test_a_group_that_has_failed_forms_again_and_takes_in_another_process(
    tmp_path: Path, fault: str, phase: str, transport: str, size: int
) -> None:
    stage = Stage(tmp_path)
    # As in the matrix, rank 0 is no better off than the others.
    faulty = 0 if transport == "shm" else size - 1
    acted = functools.partial(act, fault=fault, phase=phase, faulty=faulty)
    plan = planned(acted, size, elements=ELEMENTS, settings={"transport": transport})
    outcomes = outcomes_of(plan, stage, joiners=1)
    assert outcomes[faulty].exit_code == EXIT_CODES[fault]
    others = [outcome for outcome in outcomes if outcome.rank != faulty]
    for seen in check(plan, others):
        assert seen.groups[-1].world_size == size
        assert seen.groups[-1].generation > 2
