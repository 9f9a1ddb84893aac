"""Recorded trainings: the weights of each optimizer step of a process, for `gradring verify`.

A directory has a folder for each rank. The folder has a file for each step of any optimizer, in the
order in which steps ended, and ``facts.json`` with facts about the program. The file ``limit``
beside the folders has the number of steps after which a process ends. Between two batches of `fit`,
the other variables of the model, such as moving statistics, are recorded too.

Arrays are recorded as sketches. Arrays of up to `SKETCH` elements are their own sketch. Larger
arrays become `SKETCH` sums, each of elements with random signs. A sketch is linear, so the
difference of two sketches is the sketch of the difference, with nearly its norm.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: Largest number of elements in a sketch.
SKETCH = 4096

Sketch = npt.NDArray[np.float64]


@dataclass
class Step:
    """One update by an optimizer.

    Attributes:
        optimizer: Number of the optimizer, in the order of first updates.
        name: Name of the optimizer's class.
        number: Number of this step among those of the optimizer, from 0.
        variables: Their names.
        gradients: Norm of each gradient that the optimizer received; -1 for none.
        sent: Bytes that this rank had sent in collectives at the end of the step; None outside of a
            group.
        before: Sketch of each variable before the update.
        after: Sketch of each variable after the update.
    """

    optimizer: int
    name: str
    number: int
    variables: list[str]
    gradients: list[float]
    sent: int | None
    before: list[Sketch] = field(default_factory=list)
    after: list[Sketch] = field(default_factory=list)


@dataclass
class State:
    """Variables of a model that no optimizer updates, between two batches of `fit`.

    Attributes:
        steps: Number of steps of all optimizers that had ended.
        variables: Their names.
        values: Sketch of each variable.
    """

    steps: int
    variables: list[str]
    values: list[Sketch] = field(default_factory=list)


@dataclass
class Facts:
    """Facts about a program.

    Attributes:
        layers: Names of the classes of the program's layers, and of their parents.
        compute: Dtypes in which the layers compute.
        numbers: Digest of the state of numpy's random numbers at the first step; empty if the
            program has drawn none.
        batches: Batch sizes of datasets.
        shards: Numbers of parts into which the program divides datasets itself.
        stopped: Whether the process was ended at the limit of steps.
        warnings: Warnings of gradring.
    """

    layers: list[str] = field(default_factory=list)
    compute: list[str] = field(default_factory=list)
    numbers: str = ""
    batches: list[int] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    stopped: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass
class Training:
    """Record of one process."""

    steps: list[Step]
    facts: Facts
    states: list[State] = field(default_factory=list)


def sketch(array: Any) -> Sketch:
    """Returns a linear sketch of an array of numbers: float64 of at most `SKETCH` elements."""
    flat: Sketch = np.ravel(np.asarray(array)).astype(np.float64)
    if flat.size <= SKETCH:
        return flat
    padded = np.zeros(-(-flat.size // SKETCH) * SKETCH)
    padded[: flat.size] = flat * _signs(flat.size)
    sums: Sketch = padded.reshape(-1, SKETCH).sum(axis=0)
    return sums


@functools.lru_cache(maxsize=64)
def _signs(size: int) -> npt.NDArray[np.int8]:
    return (np.random.Generator(np.random.PCG64(size)).integers(0, 2, size, np.int8) * 2) - 1


def folder(directory: Path, rank: int) -> Path:
    """Returns the folder of a rank."""
    return directory / f"rank-{rank}"


def begin(directory: Path, limit: int) -> None:
    """Creates the directory of a training that ends after ``limit`` steps."""
    directory.mkdir(parents=True)
    (directory / "limit").write_text(str(limit))


def limit_of(directory: Path) -> int:
    """Returns the number of steps after which a process ends."""
    return int((directory / "limit").read_text())


def write_step(place: Path, index: int, step: Step) -> None:
    """Writes a step into the folder of a rank.

    Args:
        place: The folder.
        index: Number of the step among those of all optimizers.
        step: The step.
    """
    about = {key: value for key, value in asdict(step).items() if key not in ("before", "after")}
    arrays = {
        f"{name}_{number}": array
        for name, those in (("before", step.before), ("after", step.after))
        for number, array in enumerate(those)
    }
    _save(place / f"{index:06d}.npz", about, arrays)


def write_state(place: Path, index: int, state: State) -> None:
    """Writes a state into the folder of a rank.

    Args:
        place: The folder.
        index: Number of the state.
        state: The state.
    """
    about = {"steps": state.steps, "variables": state.variables}
    values = {f"value_{number}": array for number, array in enumerate(state.values)}
    _save(place / f"{index:06d}.state", about, values)


def _save(path: Path, about: dict[str, Any], arrays: dict[str, Sketch]) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    part.rename(path)


def write_facts(place: Path, facts: Facts) -> None:
    """Writes the facts about the program."""
    (place / "facts.json").write_text(json.dumps(asdict(facts)))


def read(directory: Path, ranks: int) -> Sequence[Training]:
    """Returns the record of each rank; a rank that has recorded nothing has no steps."""
    return [_read(folder(directory, rank)) for rank in range(ranks)]


def _read(place: Path) -> Training:
    facts = place / "facts.json"
    return Training(
        [_read_step(path) for path in sorted(place.glob("*.npz"))],
        Facts(**json.loads(facts.read_text())) if facts.exists() else Facts(),
        [_read_state(path) for path in sorted(place.glob("*.state"))],
    )


def _read_step(path: Path) -> Step:
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        count = len(about["variables"])
        before = [file[f"before_{number}"] for number in range(count)]
        after = [file[f"after_{number}"] for number in range(count)]
    return Step(**about, before=before, after=after)


def _read_state(path: Path) -> State:
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        return State(**about, values=[file[f"value_{n}"] for n in range(len(about["variables"]))])
