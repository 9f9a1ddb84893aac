"""Surroundings of an elastic job: certificates, monitors, metrics, and ends of programs."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from elastic.training import Plan, Seen, Trainee, at_each_loss, join, outcomes_of, planned, run
from faults.stage import Stage
from gradring.elastic import State
from gradring.errors import RendezvousError
from gradring.machine.ports import free_ports
from gradring.observe.observer import observer_of
from gradring.testing import run_ranks
from support.certificates import Authority
from support.proc import LISTEN, tcp_sockets

STEPS = 6


def replaced(trainee: Trainee) -> bool:
    """The first rank dies, and another process joins."""
    comm = trainee.comm
    if comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 0:
        trainee.die()
    if comm.generation == 2 and trainee.steps_here >= STEPS:
        trainee.stage.tell("come")
    if monitor := trainee.memory.get("monitor"):
        monitor.step()
    return comm.generation > 2 and comm.world_size == 3 and trainee.steps_here >= STEPS


#: Reductions of a group that belong to no step, most of them comparisons at its start.
COMPARED = 4


@dataclass
class Watched:
    """What a process tells of its last group."""

    seen: Seen
    metrics: str
    rank: int
    stats: Any
    steps: int
    lines: list[dict[str, Any]]
    listening: int


def train_watched(plan: Plan, stage: Stage) -> Watched:
    """Trains with a monitor, and asks its own metrics at the end."""
    place = int(os.environ["GRADRING_RANK"])
    lines: list[dict[str, Any]] = []
    with join(plan, stage, place) as comm:
        trainee = Trainee(plan, place, stage, comm, State(weights=np.zeros(10), step=0))
        monitor = gradring.Monitor(comm, every_steps=2, stream=io.StringIO(), on_line=lines.append)
        trainee.memory["monitor"] = monitor
        run(trainee)
        monitor.pause()
        server = observer_of(comm).metrics
        assert server is not None, "it serves no metrics"
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            metrics = answer.read().decode()
        stats, rank, listening = comm.stats(), comm.rank, len(tcp_sockets(LISTEN))
        comm.barrier()
        steps = monitor.totals.steps
        return Watched(trainee.seen, metrics, rank, stats, steps, lines, listening)


def a_port_for(processes: int) -> int:
    """The first of as many free ones."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for one in range(port, port + processes):
                held.enter_context(socket.create_server(("127.0.0.1", one)))
            return port


def test_certificates_monitors_and_metrics_go_on_in_the_next_group(
    stage: Stage, tmp_path: Path
) -> None:
    certificate = Authority(tmp_path).certify("all", "127.0.0.1")
    port = a_port_for(3)
    env = {**certificate.variables(), "GRADRING_PROMETHEUS_PORT": str(port)}
    plan = planned(replaced, 3, settings={"transport": "tcp"})
    outcomes = run_ranks(train_watched, 4, plan, stage, check=False, env=env)
    del outcomes[0]
    for outcome in outcomes:
        assert outcome.ok, outcome.details()
    found: list[Watched] = [outcome.value for outcome in outcomes]
    assert sorted(one.rank for one in found) == [0, 1, 2]
    for one in found:
        (about,) = (line for line in one.metrics.splitlines() if line.startswith("gradring_info{"))
        assert f'rank="{one.rank}"' in about
        assert 'world_size="3"' in about
        # It counts from the beginning of the group.
        steps = one.seen.step - one.seen.groups[-1].step
        reductions = one.stats["collectives"]["all_reduce"]["count"]
        assert reductions == pytest.approx(3 * steps + COMPARED, abs=3)
        assert set(one.stats["lateness_s"]) <= {0, 1, 2}
        assert one.steps >= steps - 1
        # Its own address, and that of its metrics.
        assert one.listening == 2
    (first,) = (one for one in found if one.rank == 0)
    assert {*first.lines[-1]["ranks"]} <= {"0", "1", "2"}


def one_is_left(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS and trainee.place == 1:
        trainee.die()
    return False


def test_too_few_workers_are_a_typed_error_that_says_how_many(stage: Stage) -> None:
    plan = planned(one_is_left, 2, workers=(2, None), timeout=1.0)
    survivor, _ = outcomes_of(plan, stage)
    error = survivor.exception
    assert isinstance(error, RendezvousError), survivor.details()
    assert "1 workers are left and 2 are needed; no others joined within 1 s" in str(error)
    assert error.rank == 0


def leave_while_agreeing(plan: Plan, stage: Stage) -> None:
    """The program ends while a thread of it waits for others."""
    place = int(os.environ["GRADRING_RANK"])
    comm = join(plan, stage, place)
    trainee = Trainee(plan, place, stage, comm, State(weights=np.zeros(10), step=0))
    if place == 1:
        run(trainee)
    threading.Thread(target=run, args=[trainee], daemon=True).start()
    stage.wait("agrees")


def ends_while_agreeing(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS and trainee.place == 1:
        trainee.die()
    if trainee.state.step == STEPS:
        at_each_loss(lambda: trainee.stage.tell("agrees"))
    return False


@pytest.mark.slow
def test_a_program_that_ends_while_it_waits_for_others_ends(stage: Stage) -> None:
    plan = planned(ends_while_agreeing, 2, workers=(2, None))
    survivor, _ = run_ranks(leave_while_agreeing, 2, plan, stage, check=False)
    assert survivor.ok, survivor.details()
    assert survivor.exit_code == 0
