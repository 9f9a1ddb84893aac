"""The notebook is one, and its cells do what they show, in order and in one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradring
from gradring.clusters import without_cluster_variables
from gradring.testing import RankFailure, RankTimeout
from support.waiting import wait_until

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
DEADLINE_S = 120
VARIES = re.compile(r"(?<=\bon )\S+|[\d.]+(?= ms)|\d+(?=%)")
"""Hosts and times."""
TRACEBACK = re.compile(r"\[\d\] (?:  |Traceback)")


def notebook() -> Any:
    return json.loads(NOTEBOOK.read_text())


def test_the_file_has_the_format_4_of_jupyter() -> None:
    found = notebook()
    assert found.keys() == {"nbformat", "nbformat_minor", "metadata", "cells"}
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["metadata"]["kernelspec"].keys() == {"name", "display_name", "language"}
    names = [cell["id"] for cell in found["cells"]]
    assert len(set(names)) == len(names)
    for cell in found["cells"]:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert cell["metadata"] == {} and isinstance(cell["source"], str)
        required = {"id", "cell_type", "metadata", "source"}
        if cell["cell_type"] == "code":
            required |= {"outputs", "execution_count"}
            for output in cell["outputs"]:
                assert output.keys() == {"output_type", "name", "text"}
                assert (output["output_type"], output["name"]) == ("stream", "stdout")
        else:
            assert cell["cell_type"] == "markdown"
        assert cell.keys() == required


def execute(source: str, names: dict[str, Any]) -> str:
    """Does what IPython would with a cell; what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), names)
    return printed.getvalue().rstrip()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fresh `__main__` in a directory of its own."""
    for name in set(os.environ) - set(without_cluster_variables(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return {"__name__": "__main__"}


def lines_of(text: str) -> list[str]:
    """Without what differs between versions of Python."""
    return [line for line in text.splitlines() if not TRACEBACK.match(line)]


def test_the_cells_print_what_the_notebook_shows(kernel: dict[str, Any]) -> None:
    cells = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    printed = [lines_of(execute(cell["source"], kernel)) for cell in cells]
    for cell, lines in zip(cells, printed, strict=True):
        shown = lines_of(cell["outputs"][0]["text"])
        # The lines before the last may differ in more than times.
        assert VARIES.sub("", lines[-1]) == VARIES.sub("", shown[-1])
        assert len(lines) == len(shown)
    assert sorted(printed[0][:3]) == [f"[{rank}] the mean is [11. 11. 11.]" for rank in range(3)]
    assert "MismatchError: " in printed[1][-1] and ": rank 1 on " in printed[1][-1]
    assert "| slowest: rank 1 " in printed[2][0]


CELL = """
import gradring
import numpy as np

class Found:
    def __init__(self, place):
        self.place = place

class NoSuchLayer(Exception):
    pass

def scaled(x):
    return 10 * x

def meet(found, fails):
    with gradring.init() as comm:
        if comm.rank == fails:
            raise NoSuchLayer("dense_7")
        print("\\u00fcber", end="")  # a line without an end
        total = comm.all_reduce(scaled(found.place + comm.rank))
        return Found(total)
"""


def test_what_cells_define_travels_to_the_ranks_and_back(
    kernel: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    execute(CELL, kernel)
    first, second = gradring.notebook.run(kernel["meet"], args=(kernel["Found"](1), None))
    assert isinstance(first, kernel["Found"])
    assert first.place == second.place == 30
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] \u00fcber", "[1] \u00fcber"]


def test_an_error_of_a_rank_is_raised_in_the_cell_with_its_name(
    kernel: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    execute(CELL, kernel)
    with pytest.raises(RankFailure, match="rank 1 failed first") as caught:
        gradring.notebook.run(kernel["meet"], 2, args=[kernel["Found"](1), 1])
    assert isinstance(caught.value.__cause__, kernel["NoSuchLayer"])
    # Its traceback was shown as it came.
    assert capsys.readouterr().out.count("[1] Traceback") == 1
    assert "Traceback" not in str(caught.value) and "last output" not in str(caught.value)
    assert str(caught.value).splitlines()[-1] == "rank 1: NoSuchLayer: dense_7"


@pytest.mark.parametrize(
    ("leaves", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise SystemExit(0)", 0),
        ("os._exit(0)", 0),
        ("os._exit(3)", 3),
    ],
)
@pytest.mark.parametrize("others_wait", [False, True])
def test_a_rank_that_exits_is_named_with_its_exit_code(
    leaves: str, code: int, others_wait: bool, kernel: dict[str, Any]
) -> None:
    source = f"""
import gradring, os, sys, numpy as np
def leave():
    with gradring.init() as comm:
        comm.barrier()
        if comm.rank == 1:
            {leaves}
        return comm.all_reduce(np.ones(3)) if {others_wait} else comm.rank
"""
    execute(source, kernel)
    with pytest.raises(RankFailure, match=f"(?m)^rank 1: .*exit code {code}\\b") as caught:
        gradring.notebook.run(kernel["leave"], 2)
    assert caught.value.rank == 1
    assert caught.value.outcomes[1].exit_code == code


def test_tensorflow_may_be_imported_in_the_notebook(kernel: dict[str, Any]) -> None:
    printed = execute(
        """
import gradring
import numpy as np
import tensorflow as tf

before = tf.reduce_sum(tf.ones(3))

def train(epochs):
    strategy = gradring.tensorflow.CustomCollectiveStrategy()
    with strategy.scope():
        weight = tf.Variable(1.0)
    def step():
        part = strategy.cluster_resolver.task_id + before
        return strategy.reduce("SUM", strategy.run(lambda: weight * part), axis=None)
    return [float(tf.function(step)()) for _ in range(epochs)]

print(gradring.notebook.run(train, 2, args=(2,)))
""",
        kernel,
    )
    assert printed.splitlines()[-1] == "[[7.0, 7.0], [7.0, 7.0]]"


def test_a_cell_that_is_interrupted_ends_its_ranks(tmp_path: Path) -> None:
    code = """
import os, time, gradring
def wait():
    print(os.getpid())
    time.sleep(1000)
gradring.notebook.run(wait, 2)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None and it.stderr is not None
        pids = [int(it.stdout.readline().split()[1]) for _ in range(2)]
        it.send_signal(signal.SIGINT)
        assert it.stderr.read().rstrip().endswith("KeyboardInterrupt")
        it.wait(DEADLINE_S)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "both have ended")


def test_a_function_out_of_time_is_named(kernel: dict[str, Any]) -> None:
    execute("def wait(): import time; time.sleep(1000)", kernel)
    with pytest.raises(RankTimeout, match="rank 0 of 1 had not finished after 3 s"):
        gradring.notebook.run(kernel["wait"], 1, timeout=3)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ((3,), TypeError, "give a function"),
        ((len, "2"), TypeError, "a number of ranks"),
        ((len, 2, 5), TypeError, "a tuple of arguments"),
        ((len, 0), ValueError, "must be at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused(wrong: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        gradring.notebook.run(*wrong)


def test_what_cannot_travel_is_named() -> None:
    with (
        gradring.init() as comm,
        pytest.raises(TypeError, match="make that object inside the function"),
    ):
        gradring.notebook.run(lambda: comm.rank, 2)
