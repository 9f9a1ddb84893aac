"""``gradring run --ps``: a server and a worker that end at once start again, and all go on."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from gradring.machine.ports import free_ports
from support.commands import command_line, completed, succeeded
from support.keras_models import needs_fit

#: What this takes is TensorFlow's start in five processes.
DEADLINE_S = 300

PROGRAM = """
import json, os, signal, sys, urllib.request
from pathlib import Path

import keras
import tensorflow as tf

import gradring
from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy

REPLICAS = int(sys.argv[1])
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
WHO, LIFE = f"{TASK['type']}-{TASK['index']}", int(os.environ["GRADRING_RESTART"])


def note(what):
    partial = Path(f"{what}.partial-{WHO}")
    partial.write_text(str(os.getpid()))
    partial.rename(what)


if TASK["type"] == "ps" and TASK["index"] == 0:
    note(f"server-{LIFE}")
# A copy does for a directory.
kept = {"replicas": 1} if REPLICAS else {"snapshots": "snapshots"}
rule = updates.ParameterServer(staleness=None, snapshot_every=5, **kept)
strategy = CustomCollectiveStrategy(update=rule)
with strategy.scope():
    weight = tf.Variable([10.0])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.5)


@tf.function
def step():
    def replica_step():
        with tf.GradientTape() as tape:
            loss = weight**2 / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    return strategy.run(replica_step)


def goes_on(steps):
    if TASK["index"] == 1:
        if LIFE == 0 and versions[-1] >= 20 and Path("trains").exists():
            note("killed")
            os.kill(int(Path("server-0").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if LIFE == 1 and steps == 5:
            note("back")
        return LIFE == 0 or steps < 5
    note("trains")
    told.append(bool(strategy.update_stats()["servers"]["staleness"]))
    # A line comes with every fifth step.
    return not (Path("back").exists() and versions[-1] >= 40 and sum(told) > 5)


versions, losses, told = [], [], []
with gradring.Monitor(strategy, every_steps=5) as monitor:
    while not versions or goes_on(len(versions)):
        losses.append(float(step()[0]))
        versions.append(strategy.update_stats()["version"])
        monitor.step()
found = {"life": LIFE, "versions": versions, "losses": losses}
if TASK["index"] == 0:
    port = int(os.environ["GRADRING_PROMETHEUS_PORT"])
    for name, offset in (("worker", 0), ("server", 2)):
        with urllib.request.urlopen(f"http://127.0.0.1:{port + offset}/metrics") as answer:
            found[name] = answer.read().decode()
Path(f"found-{TASK['index']}").write_text(json.dumps(found))
"""


@needs_fit
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_and_a_worker_that_end_at_once_start_again_and_go_on(
    replicas: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = ["run", "-np", 2, "--ps", 1 + replicas, "--max-restarts", 2]
    program = ["--", sys.executable, "train.py", replicas]
    port = str(free_ports(1)[0])
    served = {"GRADRING_PROMETHEUS_PORT": port}
    ended = succeeded(*command, *program, env=served, cwd=tmp_path, timeout=DEADLINE_S)
    assert len(re.findall(r"failed \(killed by SIGKILL\); .* again", ended.stderr)) == 2
    first, second = (json.loads((tmp_path / f"found-{it}").read_text()) for it in range(2))
    assert second["life"] == 1
    versions = first["versions"]
    # From the last snapshot, and not from the beginning; with copies, from where they were.
    given_up = 0 if replicas else 9
    assert all(later >= earlier - given_up for earlier, later in pairwise(versions))
    assert second["versions"][0] >= (20 if replicas else 10)
    assert max(second["losses"]) < first["losses"][0]
    assert first["losses"][-1] < first["losses"][0] / 10
    assert re.search(r"version \d+, staleness \d.*, \d+ queued, \d+ dropped$", ended.stdout, re.M)
    assert "Worker 1 is in pulls, and waits for servers, " in ended.stdout
    assert f'gradring_version{{rank="0"}} {float(versions[-1])}' in first["worker"]
    assert 'gradring_gradients_total{server="0",fate="applied"}' in first["server"]
    assert 'gradring_gradient_staleness_bucket{server="0",le="+Inf"}' in first["server"]


AGAIN = """
import os, signal, sys
import keras
import tensorflow as tf
from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy

rule = updates.ParameterServer(snapshots="snapshots", snapshot_every=2)
strategy = CustomCollectiveStrategy(update=rule)
with strategy.scope():
    weight = tf.Variable(100.0)
    optimizer = keras.optimizers.SGD(1.0)


@tf.function
def step():
    strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), weight)]))


for number in range(7):
    step()
    if number == 0:
        print("first", float(weight), strategy.update_stats()["version"])
if sys.argv[1] == "raises":
    raise ValueError("no such layer")
if sys.argv[1] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "leaves":
    strategy.leave()
    os._exit(5)  # such as in an evaluation
"""


@needs_fit
@pytest.mark.parametrize(
    ("first", "goes_on"),
    [
        ("ends", False),
        ("raises", True),
        pytest.param("leaves", False, marks=pytest.mark.slow),
        pytest.param("interrupted", True, marks=pytest.mark.slow),
        pytest.param("killed", True, marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_from_the_snapshots_of_one_that_failed_and_not_of_one_that_ended_well(
    first: str, goes_on: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(AGAIN)
    for how in (first, "ends"):
        command = ("run", "-np", 1, "--ps", 1, "--", sys.executable, "train.py", how)
        done = completed(command_line(*command), cwd=tmp_path, timeout=DEADLINE_S)
        assert (done.returncode == 0) == (how == "ends"), done.stderr
    _, value, version = re.findall(r"(first) (\S+) (\d+)", done.stdout)[0]
    assert float(value) == 100 - (int(version) - 1)
    where = re.findall(r"all servers go on from snapshot (\d+) of snapshots/server-0", done.stderr)
    assert where == ([str(int(version) - 1)] if goes_on else [])
    begins_anew = "begins anew: the last job here has finished, and snapshots/server-0.finished"
    assert (begins_anew in done.stderr) == (not goes_on)
    if not goes_on:
        assert int(version) == 2
