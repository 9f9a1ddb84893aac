"""Elastic jobs under TensorFlow: one job, in which four processes come to different ends."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import gradring
from faults.stage import Stage
from gradring.errors import MismatchError
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.waiting import wait_until

JOB = Path(__file__).with_name("tensorflow_job.py")
FOUNDERS = ("first", "killed", "leaving")
NAMES = (*FOUNDERS, "joining")
TIMEOUT_S = 300.0


class Job:
    """What the processes have told."""

    def __init__(self, directory: Path, log: str) -> None:
        self._directory = directory
        self.log = log

    def told(self, name: str, what: str = "") -> list[dict[str, Any]]:
        """What a process has told, all of it or of one kind."""
        path = self._directory / name
        lines = path.read_text().splitlines() if path.exists() else []
        facts = [cast(dict[str, Any], json.loads(line)) for line in lines]
        return [fact for fact in facts if what in ("", fact["what"])]


def take_part(directory: Path, address: str) -> None:
    """Is one of the processes: a program that knows of the others only the address."""
    name = NAMES[int(os.environ["GRADRING_RANK"])]
    if name == "joining":
        job = Job(directory, log="")
        wait_until(lambda: bool(job.told("first")), "the job has begun", TIMEOUT_S)
        for variable in ("RANK", "WORLD_SIZE", "RENDEZVOUS"):
            del os.environ[f"GRADRING_{variable}"]
        os.environ["GRADRING_JOIN"] = address
    else:
        os.environ |= {"GRADRING_WORLD_SIZE": "3", "GRADRING_RENDEZVOUS": address}
    sys.argv = [str(JOB), name, str(directory)]
    runpy.run_path(str(JOB), run_name="__main__")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job, when it is over."""
    directory = tmp_path_factory.mktemp("job")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    outcomes = run_ranks(take_part, 4, directory, address, check=False, env=env, timeout=TIMEOUT_S)
    codes = {name: outcome.exit_code for name, outcome in zip(NAMES, outcomes, strict=True)}
    said = "\n".join(outcome.details() for outcome in outcomes)
    assert codes == {"first": -9, "killed": -9, "leaving": 143, "joining": 0}, said
    return Job(directory, said)


def _told(job: Job, name: str, what: str, *facts: str) -> list[tuple[Any, ...]]:
    return [tuple(told[fact] for fact in facts) for told in job.told(name, what)]


def test_a_loop_goes_back_to_its_last_commit_and_no_further(job: Job) -> None:
    for survivor in ("first", "leaving"):
        assert _told(job, survivor, "loop begins", "step", "size") == [(0, 3), (4, 3)]
    assert _told(job, "joining", "loop begins", "step", "size", "rank") == [(4, 3, 1)]


def test_the_log_says_why_without_the_words_of_tensorflow(job: Job) -> None:
    lines = re.findall(r"^.* goes back to its last commit, and .*$", job.log, re.MULTILINE)
    assert lines
    for line in lines:
        why = line.partition("forms a new group: ")[2]
        assert re.match(r"\w+\(.*\) .*\(collective #\d+\): rank \d on ", why), line
        assert "restart the job" not in why


def test_a_function_is_not_traced_anew_where_rank_and_world_size_are_as_before(job: Job) -> None:
    for name in ("first", "leaving", "joining"):
        ((traces,),) = _told(job, name, "loop ends", "traces")
        assert (traces["strategy"], traces["reducer"]) == (1, 1)


def test_all_ranks_have_the_bits_and_the_steps_of_a_loop_without_a_loss(job: Job) -> None:
    told = [
        _told(job, name, "loop ends", "digest", "counted") for name in FOUNDERS if name != "killed"
    ]
    assert told[0] == told[1] == _told(job, "joining", "loop ends", "digest", "counted")
    assert told[0][0][1] == 8


def test_fit_loses_what_came_after_the_last_commit_and_with_sigterm_nothing(job: Job) -> None:
    begun = [(0, 0, 3), (1, 4, 2)]
    assert _told(job, "leaving", "fit begins", "epoch", "step", "size") == begun
    begun = [*begun, (2, 8, 1)]
    assert _told(job, "joining", "fit begins", "epoch", "step", "size") == begun


def test_fit_traces_its_steps_anew_once_for_each_place(job: Job) -> None:
    epochs = _told(job, "joining", "epoch ends", "epoch", "traces")
    fit, validation = ([told[kind] for _, told in epochs] for kind in ("fit", "validation"))
    assert fit == [fit[0], 2 * fit[0], 3 * fit[0]]
    assert validation == [validation[0], 2 * validation[0], 3 * validation[0]]


def test_all_ranks_have_the_same_bits_at_the_end_of_an_epoch(job: Job) -> None:
    epochs = {name: _told(job, name, "epoch ends", "digest", "logs") for name in NAMES}
    assert epochs["first"] == epochs["leaving"][:1] == epochs["joining"][:1]
    assert epochs["leaving"][1] == epochs["joining"][1]


def test_fit_ends_with_the_weights_of_one_process_that_had_the_same_global_batches(
    job: Job,
) -> None:
    ((furthest,),) = _told(job, "joining", "end", "furthest")
    assert furthest < 1e-4


def train_with_odd_ones(stage: Stage, address: str) -> list[tuple[int, int]]:
    """Two join that have another strategy; tells what each group looked like."""
    import tensorflow as tf

    from gradring import updates
    from gradring.tensorflow import CustomCollectiveStrategy, elastic

    place = int(os.environ["GRADRING_RANK"])
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, logical)
    if place:
        stage.wait(f"come-{place}", within_s=TIMEOUT_S)
        comm = gradring.init(join=[address])
    else:
        comm = gradring.init(rank=0, world_size=1, rendezvous=address)
    devices = ["CPU:0", "CPU:1"] if place < 2 else ["CPU:0"]
    update = updates.AllReduce(sync_every=2 if place == 3 else 1)
    with comm:
        strategy = CustomCollectiveStrategy(communicator=comm, devices=devices, update=update)
        with strategy.scope():
            total = tf.Variable(0.0)

        @tf.function  # type: ignore[untyped-decorator]
        def step() -> None:
            def in_replica() -> None:
                one = tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))
                total.assign_add(one / strategy.num_replicas_in_sync)

            strategy.run(in_replica)

        state = elastic.State(variables=[total], step=0)
        groups = []

        @elastic.run(strategy)
        def train(state: elastic.State) -> None:
            groups.append((comm.world_size, strategy.num_replicas_in_sync))
            while True:
                enough = comm.world_size == 2 and stage.told("ended-3") is not None
                step()
                state.step += 1
                values = strategy.experimental_local_results(total)
                assert [float(value) for value in values] == [state.step] * len(devices)
                state.commit()
                if comm.rank == 0 and state.step > 3:
                    stage.tell("come-1")
                    if comm.world_size == 2:
                        stage.tell("come-2")
                    if stage.told("ended-2") is not None:
                        stage.tell("come-3")
                if comm.all_reduce(np.array([enough], np.uint8), "min")[0]:
                    return

        try:
            train(state)
        finally:
            stage.tell(f"ended-{place}")
        return groups


@pytest.mark.slow
def test_who_joins_needs_the_devices_and_the_update_rule_of_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    outcomes = run_ranks(
        train_with_odd_ones, 4, stage, address, check=False, env=env, timeout=TIMEOUT_S
    )
    first, second, *odd = outcomes
    assert first.ok, first.details()
    assert second.ok, second.details()
    assert first.value[0] == (1, 2)
    assert {first.value[1], first.value[-1], *second.value} == {(2, 4)}
    words = [
        "has local_devices=1, and rank",
        "has update=AllReduce(compression=None, sync_every=2)",
    ]
    for outcome, said in zip(odd, words, strict=True):
        assert isinstance(outcome.exception, MismatchError), outcome.details()
        assert said in str(outcome.exception)
