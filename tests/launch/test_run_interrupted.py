"""Ctrl-C: one line at once, an end that the ranks come to by themselves, and one traceback."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import script, started

#: Far more than any rank needs to end, so that none that ends was killed.
GRACE_S = 200


def interrupted(
    ranks: int, *arguments: object, signum: int = signal.SIGINT
) -> "tuple[int, list[str], list[str]]":
    """Runs ranks that say "ready" once, and signals the launcher then; exit code and both outputs.

    The launcher's errors are read when it has ended: they are few lines.
    """
    run = ("run", "-np", ranks, "--grace", GRACE_S, *arguments)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(*run, env=environ, **streams) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        printed: list[str] = []
        while sum("ready" in line for line in printed) < ranks:
            line = launcher.stdout.readline()
            assert line, (printed, launcher.stderr.read())
            printed.append(line)
        launcher.send_signal(signum)
        printed += launcher.stdout
        errors = launcher.stderr.read().splitlines()
        return launcher.wait(), [line.rstrip("\n") for line in printed], errors


ENDS_LATE = (
    "try:\n"
    "    print('ready', flush=True)\n"
    # A signal that comes just before it waits is seen a second later.
    "    while True: signal.sigtimedwait((), 1)\n"
    "finally:\n"
    "    print('tidies up', file=sys.stderr)\n"
)


def test_ctrl_c_is_answered_at_once_and_shows_one_traceback(tmp_path: Path) -> None:
    code, _, errors = interrupted(3, "--log-dir", tmp_path, *script(tmp_path, ENDS_LATE))
    assert code == 128 + signal.SIGINT
    assert errors[0] == (
        f"gradring run: interrupted: ranks have {GRACE_S} s to end; Ctrl-C again ends them now"
    )
    assert sum("Traceback" in line for line in errors) == 1
    assert sum("KeyboardInterrupt" in line for line in errors) == 1
    # What is no traceback is shown of all.
    assert sorted(re.findall(r"\[(\d)\] tidies up", "\n".join(errors))) == ["0", "1", "2"]
    assert re.fullmatch(
        r"gradring run: not shown: 2 more tracebacks, up to the end \(\d+ lines\); "
        rf"all output: {tmp_path}",
        errors[-1],
    )
    for rank in range(3):
        assert "KeyboardInterrupt" in (tmp_path / f"rank-{rank}.log").read_text()


def test_a_single_rank_is_spoken_of_as_one(tmp_path: Path) -> None:
    code, _, errors = interrupted(1, *script(tmp_path, ENDS_LATE))
    assert code == 128 + signal.SIGINT
    assert errors[0].endswith(f"the rank has {GRACE_S} s to end; Ctrl-C again ends it now")
    assert errors[-1] == "[0] KeyboardInterrupt"


def test_another_signal_is_named(tmp_path: Path) -> None:
    program = script(tmp_path, "print('ready', flush=True)\nsignal.pause()\n")
    code, _, errors = interrupted(2, *program, signum=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert errors == [
        f"gradring run: SIGTERM: ranks have {GRACE_S} s to end; SIGTERM again ends them now"
    ]


FIT = """
import atexit
import gradring.tensorflow
import keras
import numpy as np
import tensorflow as tf

strategy = gradring.tensorflow.CustomCollectiveStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution={steps})

def sample(number):
    if number == 1000: print("ready", flush=True)
    return np.ones((1, 4), "float32"), np.ones((1, 1), "float32")

def made(number):
    x, y = tf.numpy_function(sample, [number], [tf.float32, tf.float32])
    return tf.ensure_shape(x, (1, 4)), tf.ensure_shape(y, (1, 1))

atexit.register(print, "ended")
try:
    model.fit(tf.data.Dataset.range(10**9).map(made), verbose=0)
finally:
    print("left fit", flush=True)
"""


@pytest.mark.parametrize("steps", [1, pytest.param(10**6, marks=pytest.mark.slow)])
def test_a_fit_ends_by_itself_also_in_a_graph_of_many_steps(tmp_path: Path, steps: int) -> None:
    code, printed, errors = interrupted(2, *script(tmp_path, FIT.format(steps=steps)))
    assert code == 128 + signal.SIGINT
    for rank in range(2):
        own = [line for line in printed if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] ready", f"[{rank}] left fit", f"[{rank}] ended"]
    (told,) = [number for number, line in enumerate(errors) if ": interrupted: " in line]
    tracebacks = {number: line for number, line in enumerate(errors) if "Traceback" in line}
    assert told < min(tracebacks)
    assert len({line[:3] for line in tracebacks.values()}) == 1, "of one rank"
    assert any(line.endswith("KeyboardInterrupt") for line in errors)
