"""The notebook is one, and its cells do what they show, in order and in one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradring.clusters import without_cluster_variables

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
DEADLINE_S = 120
VARIES = re.compile(r"(?<=\bon )\S+|[\d.]+(?= ms)|\d+(?=%)")
"""Hosts and times."""


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
    """Does what IPython would with a cell, as far as ours go; what it printed."""
    if source.startswith("%%writefile "):
        head, _, text = source.partition("\n")
        Path(head.split()[1]).write_text(f"{text}\n")
        return f"Writing {head.split()[1]}"
    printed = io.StringIO()
    code, bang, command = source.partition("\n!")
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "cell", "exec"), names)
    if bang:
        command = re.sub(r"\{(.*?)\}", lambda found: str(eval(found[1], names)), command)
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        printed.write(done.stdout)
    return printed.getvalue().rstrip()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A fresh `__main__` in a directory of its own, whose modules can be imported."""
    for name in set(os.environ) - set(without_cluster_variables(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {"__name__": "__main__"}
    sys.modules.pop("ranks")


def test_the_cells_print_what_the_notebook_shows(kernel: dict[str, Any]) -> None:
    cells = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    printed = [execute(cell["source"], kernel).splitlines() for cell in cells]
    for cell, lines in zip(cells, printed, strict=True):
        (output,) = cell["outputs"]
        # The lines before the last may differ in more than times.
        assert VARIES.sub("", lines[-1]) == VARIES.sub("", output["text"].splitlines()[-1])
        assert len(lines) == len(output["text"].splitlines())
    assert printed[1] == [f"{rank} [1.0, 1.0, 1.0]" for rank in range(3)]
    assert "MismatchError: " in printed[2][0] and ": rank 1 on " in printed[2][0]
    assert "| slowest: rank 1 " in printed[4][0]
