"""Every program of examples/ runs on two workers and does what it says."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradring.clusters import without_cluster_variables
from gradring.machine import resources
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.commands import succeeded
from support.keras_models import needs_fit

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK_START = EXAMPLES.with_name("docs") / "quick-start.md"
DEADLINE_S = 120
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

THE_LINE = (
    "    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.\n"
    "    strategy = CustomCollectiveStrategy()\n"
)
#: The one program about a method that MultiWorkerMirroredStrategy does not have.
OURS_ALONE = "broadcast_update.py"
#: The programs with servers: their rules are those of gradring alone.
SERVED, PLACED = "parameter_server.py", "placed_variable.py"
#: Without TensorFlow: test_pytorch.py.
PYTORCH = "pytorch_hook.py"
#: On a cluster of Ray: tests/engines/test_ray_elastic.py.
RAY = "ray_elastic.py"
FILES = sorted(file.name for file in EXAMPLES.glob("*.py"))


def launched(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Two workers that have ended well."""
    run = ["run", "-np", 2, *options, "--", sys.executable, program]
    return succeeded(*run, timeout=DEADLINE_S, env=QUIET)


def run_two(program: Path) -> list[str]:
    """Runs two workers, and returns what both of them printed, which must be the same."""
    done = launched(program)
    first, second = (
        [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        for rank in (0, 1)
    )
    assert first == second, done.stdout
    assert first, done.stderr
    return first


Run = Callable[[Path], list[str]]


def printed_by(program: Path) -> list[str]:
    """What a program prints that runs in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(program), run_name="__main__")
    return printed.getvalue().splitlines()


def run_copies(program: Path) -> list[str]:
    """As `run_two`, on copies of processes with `tensorflow`, without the launcher."""
    printed: list[list[str]] = run_ranks(printed_by, 2, program, timeout=DEADLINE_S)
    assert printed[0] == printed[1] != []
    return printed[0]


@pytest.fixture(params=["copies", pytest.param("launched", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs two workers, in a quick way and in that of a user."""
    return run_two if request.param == "launched" else run_copies


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.\d+", line)]


@needs_fit
def test_fit_finds_its_place_in_tf_config_alone() -> None:
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    started = []
    for index in (0, 1):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {**without_cluster_variables(os.environ), **QUIET}
        environment["TF_CONFIG"] = json.dumps(place)
        command = [sys.executable, str(EXAMPLES / "fit.py")]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    loss, weights = outputs[0][0].splitlines()
    first, last = numbers(loss)
    assert last < first / 10
    assert weights.startswith("weights ")


def losses_that_fall(lines: list[str]) -> list[str]:
    """The lines of the custom loop without the last one, which has the weights."""
    *epochs, weights = lines
    losses = [numbers(line)[0] for line in epochs]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    assert weights.startswith("weights ")
    return epochs


def test_the_custom_loop_learns() -> None:
    losses_that_fall(run_copies(EXAMPLES / "custom_loop.py"))


# Workers of MultiWorkerMirroredStrategy end with different weights under older ones.
@pytest.mark.slow
@needs_fit
def test_the_custom_loop_trains_as_under_multi_worker_mirrored_strategy(tmp_path: Path) -> None:
    text = (EXAMPLES / "custom_loop.py").read_text()
    theirs = tmp_path / "custom_loop.py"
    theirs.write_text(
        text.replace(
            "= CustomCollectiveStrategy()", "= tf.distribute.MultiWorkerMirroredStrategy()"
        )
    )
    ours = losses_that_fall(run_two(EXAMPLES / "custom_loop.py"))
    *mirrored, _ = run_two(theirs)
    for mine, other in zip(ours, mirrored, strict=True):
        assert numbers(mine) == pytest.approx(numbers(other), abs=1e-4)


@needs_fit
def test_standard_training_learns_the_digits(run: Run) -> None:
    scores, weights = run(EXAMPLES / "standard_training.py")
    first, last, accuracy = numbers(scores)
    assert last < first / 2 and accuracy > 0.7
    assert weights.startswith("weights ")


def test_the_primarys_update_moves_every_replica(run: Run) -> None:
    *steps, position = run(EXAMPLES / "primary_update.py")
    distances = [numbers(step)[0] for step in steps]
    for before, after in itertools.pairwise(distances):
        assert after == pytest.approx(before / 2, abs=1e-5)
    # After five halvings, 31/32 of the way to the primary's target, and not to anybody else's.
    assert numbers(position) == pytest.approx([31 / 32, 62 / 32, 93 / 32], abs=1e-5)


def test_a_broadcast_update_gives_every_rank_the_same_random_numbers(run: Run) -> None:
    averages, weights = run(EXAMPLES / OURS_ALONE)
    assert averages.startswith("averages ") and weights.startswith("weights ")


def test_a_partial_restore_takes_one_layer_back_on_every_replica(run: Run) -> None:
    start, trained, restored = (line.split() for line in run(EXAMPLES / "partial_restore.py"))
    assert start[2] != trained[2] and start[4] != trained[4]
    assert restored[2] == start[2], "the body is the saved one"
    assert restored[4] == trained[4], "the head keeps its training"


@needs_fit
def test_the_two_machine_fit_learns(run: Run) -> None:
    loss, weights = run(EXAMPLES / "mnist_two_machines.py")
    first, last = numbers(loss)
    assert last < first / 2
    assert weights.startswith("weights ")


@pytest.mark.slow
@needs_fit
@pytest.mark.parametrize(
    ("rule", "servers"),
    [("asynchronous", 1), ("synchronous", 1), ("queue", 1), ("placement", 2)],
)
def test_workers_learn_by_servers_also_when_one_of_them_is_lost(rule: str, servers: int) -> None:
    command = ["run", "-np", "3", "--ps", str(servers), "--", sys.executable]
    with subprocess.Popen(
        [sys.executable, "-m", "gradring", *command, str(EXAMPLES / SERVED), rule],
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if rule == "asynchronous" and line.startswith("[2] worker 2 epoch 0 "):
                os.kill(process_of_rank(2, running.pid), signal.SIGKILL)
        output = "".join(said)
        assert running.wait(DEADLINE_S) == 0, output
    accuracies = re.findall(r"worker (\d) accuracy (\S+)", output)
    lost = rule == "asynchronous"
    assert [worker for worker, _ in sorted(accuracies)] == ["0", "1", "2"][: 3 - lost], output
    assert min(float(accuracy) for _, accuracy in accuracies) > 0.8, output
    assert ("failed (killed by SIGKILL); the others continue without it" in output) == lost
    assert output.count(" ends: version ") == servers, output


@needs_fit
def test_a_placed_variable_is_on_its_server_and_learns_on_the_workers() -> None:
    done = launched(EXAMPLES / PLACED, "--ps", "2")
    for worker in (0, 1):
        first, last = re.findall(rf"^\[{worker}\] loss (\S+)$", done.stdout, re.MULTILINE)
        assert float(last) < float(first) / 2, done.stdout
    # The variables of synchronous workers are the same, and so is the loss of the same images.
    assert len(set(re.findall(r"loss (\S+)", done.stdout))) == 2, done.stdout
    sent = re.findall(r"ps (\d) ends: version \d+, (\S+) MB sent", done.stdout + done.stderr)
    of_server = {server: float(megabytes) for server, megabytes in sent}
    assert of_server["0"] > 5 and of_server["1"] < 0.1, sent


def process_of_rank(rank: int, launcher: int) -> int:
    """Of the processes that the launcher has started, the one with this rank."""
    for pid in resources.processes():
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            stat = Path(f"/proc/{pid}/stat").read_text()
            parent = int(stat.rpartition(")")[2].split()[1])
            if parent == launcher and f"GRADRING_RANK={rank}".encode() in variables:
                return pid
    raise AssertionError(f"the launcher has no rank {rank}")


@pytest.mark.parametrize(
    "name", [name for name in FILES if name not in (OURS_ALONE, PYTORCH, RAY, SERVED, PLACED)]
)
def test_one_line_changes_the_strategy(name: str) -> None:
    """Nothing but that line uses gradring, apart from its import."""
    text = (EXAMPLES / name).read_text()
    assert text.count(THE_LINE) == 1
    nodes = list(ast.walk(ast.parse(text)))
    imported = [n for n in nodes if isinstance(n, ast.ImportFrom) and "gradring" in str(n.module)]
    assert [[a.name for a in n.names] for n in imported] == [["CustomCollectiveStrategy"]]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    assert names.count("CustomCollectiveStrategy") == 1 and "gradring" not in names


def test_the_quick_start_lists_every_example() -> None:
    listed = re.findall(r"examples/(\w+\.py)", QUICK_START.read_text())
    assert sorted(set(listed)) == FILES
