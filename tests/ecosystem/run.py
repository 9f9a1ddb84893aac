"""A program in one process and on two ranks, and how far they are apart."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ecosystem.catalogue import Program
from ecosystem.environments import make_environment
from gradring.machine import resources

RANKS = 2
#: For one process, or for the ranks, in seconds.
TIMEOUT_S = 3600
#: Lines of output that explain a failure.
TAIL = 25
#: Of Open MPI's mpirun, which asks who may; with fewer cores than ranks, too.
AS_ROOT = ("--allow-run-as-root", "--oversubscribe")
STRATEGY, WITH_STRATEGY = "CustomCollectiveStrategy", "with-strategy"
DIFFERENT = "the ranks have different weights"


@dataclass
class Result:
    """What became of a program.

    Attributes:
        program: Its name.
        versions: Of the package and of those that it computes with.
        day: When it ran.
        machine: On which it ran.
        distance: Between the weights of a rank and of one process: the Euclidean norm of the
            difference, over that of what training has changed.
        loss: The largest difference of an epoch's loss, relative to the loss.
        ratio: The seconds of an epoch on the ranks, over those of one process; None where other
            programs used the cores.
        problems: What is not as it must be.
        more: What else the program noted.
    """

    program: str
    versions: dict[str, str]
    day: str
    machine: str
    distance: float = float("nan")
    loss: float = float("nan")
    ratio: float | None = None
    problems: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def as_line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


@dataclass
class Run:
    """What one process has noted."""

    noted: dict[str, Any]
    first: list[np.ndarray]
    last: list[np.ndarray]


class Failed(Exception):
    """A program that did not end well; the text is the end of its output."""


def run(program: Program, wheel: Path) -> Result:
    """Runs it both ways, with this wheel."""
    result = Result(program.name, {}, date.today().isoformat(), resources.machine())
    try:
        environment = make_environment(program.package, wheel)
        alone = _run(program, environment, ranks=None)[0]
        ranks = _run(program, environment, ranks=RANKS)
    except (Failed, subprocess.CalledProcessError) as error:
        result.problems.append(str(error))
        return result
    result.versions = {program.package.name: program.package.version}
    result.versions |= {name: found for name, found in alone.noted["versions"].items() if found}
    result.more = ranks[0].noted["more"]
    return compared(result, program, alone, ranks)


def compared(result: Result, program: Program, alone: Run, ranks: list[Run]) -> Result:
    """Fills in the numbers, and what is wrong with them."""
    moved = _norm(alone.last, alone.first)
    result.distance = max(_norm(rank.last, alone.last) for rank in ranks) / (moved or 1.0)
    ours, theirs = (np.array(each.noted["losses"]) for each in (ranks[0], alone))
    if ours.shape == theirs.shape:
        result.loss = float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-6)))
    if alone.noted["epoch_s"]:
        result.ratio = ranks[0].noted["epoch_s"] / alone.noted["epoch_s"]
    digests = {rank.noted["digest"] for rank in ranks}
    if len(digests) != 1:
        result.problems.append(DIFFERENT)
    if program.is_given_strategy and {rank.noted["strategy"] for rank in ranks} != {STRATEGY}:
        result.problems.append("a rank has lost the strategy, and trained by itself")
    if {rank.noted["ranks"] for rank in ranks} != {RANKS}:
        result.problems.append("a rank has no group of gradring with the others")
    if not moved > 0:
        result.problems.append("training has changed nothing")
    # Written so that NaN is a problem.
    if not result.distance <= program.tolerance:
        result.problems.append(f"the weights are {result.distance:.0e} from those of one process")
    if program.compares_losses and not result.loss <= program.tolerance:
        result.problems.append(f"a loss is {result.loss:.0e} from that of one process")
    return result


def _norm(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        return float("nan")
    squares = (
        np.sum(np.square(a.astype(np.float64) - b.astype(np.float64)))
        for a, b in zip(ours, theirs, strict=True)
        # Counters of steps would be most of what training has changed.
        if a.dtype.kind == "f"
    )
    return float(np.sqrt(sum(squares)))


def _run(program: Program, environment: Path, ranks: int | None) -> list[Run]:
    binaries = environment / "bin"
    command = [str(binaries / "python"), str(program.path), *program.arguments]
    if ranks is not None and program.by_mpirun:
        command = [str(binaries / "mpirun"), *AS_ROOT, "-np", str(ranks), *command]
    elif ranks is not None and not program.starts_ranks:
        option = WITH_STRATEGY if program.is_given_strategy else program.option
        options = [f"--{option}"] if option else []
        command = [str(binaries / "gradring"), "run", *options, "-np", str(ranks), *command]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        inherited = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
        asked = {
            **inherited,
            **program.package.variables,
            **program.variables,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # A program that was written for Horovod imports it in one process, too.
            **({variable(program.option): "1"} if program.option else {}),
            "ECOSYSTEM_RECORD": directory,
            "ECOSYSTEM_RANKS": str(ranks or 1),
        }
        where = "one process" if ranks is None else f"{ranks} ranks"
        # What a program writes goes where nobody looks.
        exit_code, output = _ended(command, Path(directory), asked)
        if exit_code:
            tail = "\n".join(output.splitlines()[-TAIL:])
            raise Failed(f"{where}: {exit_code}\n{tail}")
        return [_read(Path(directory), rank) for rank in range(ranks or 1)]


def _ended(command: list[str], directory: Path, asked: dict[str, str]) -> tuple[str, str]:
    """How it has failed, if it has, and its output."""
    # In a file: with a pipe, whatever it leaves behind would have to end first.
    with open(directory / "output", "w+") as output:
        try:
            code = subprocess.run(
                command,
                cwd=directory,
                env=asked,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
            failed = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = f"not done after {TIMEOUT_S} s"
        output.seek(0)
        return failed, output.read()


def variable(option: str) -> str:
    """What asks for the same as an option of `gradring run`, without that."""
    return f"GRADRING_{option.upper().replace('-', '_')}"


def _read(directory: Path, rank: int) -> Run:
    written = directory / f"{rank}.json"
    if not written.exists():
        raise Failed(f"rank {rank} has noted nothing")
    noted = json.loads(written.read_text())
    with np.load(directory / f"{rank}.npz") as arrays:
        first, last = (
            [arrays[f"{kind}{i}"] for i in range(sum(n.startswith(kind) for n in arrays.files))]
            for kind in ("first", "last")
        )
    return Run(noted, first, last)
