"""Results of the three trainings: checks, a table, the comparison in words, and a picture.

Times exclude the first step, which builds the graphs, as in `gradring.Monitor`. Only the picture
imports matplotlib.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.config.words import counted
from gradring.tools.bench.pictures import drawing

WIDTH = 100
REQUIRED_ACCURACY = 0.97
#: Largest accepted difference of a weight from the single process's; rounding stays below.
LARGEST_DIFFERENCE = 1e-5
GRADRING, MIRRORED, SINGLE = "gradring", "multi-worker-mirrored", "single"
HEADER = (
    "training               rank  samples/s  step ms = compute + communication + waiting     "
    "p50     p90     p99  SHA-256 of the weights"
)
COLUMNS = """\
  samples/s      this rank's images per step, divided by the duration of a step
  step ms        duration of an average step, from asking for the batch to having the loss
  compute        all of it in which the step does not stand still for a collective
  communication  time in which it stands still while bytes move and are summed
  waiting        time in which it stands still because the other rank has not arrived yet
  p50, p90, p99  percentiles of the steps' durations in ms
  Averages and percentiles are of all steps but the first, which builds the graphs. TensorFlow's
  own strategy has no counters, so its steps are not split."""
PICTURE = "comparison.png"
PARTS = {
    "compute": "#3b6ea5",
    "communication": "#e08a3c",
    "waiting for the other rank": "#c6c0b3",
    "step that is not split": "#8a93a0",
}


@dataclass(frozen=True)
class RankResult:
    """The results of one process, as the training script writes them.

    ``parts_ms`` are compute (with input), communication and waiting; their sum is the average
    step. ``weights_hash`` has the first digits of the SHA-256 of all weights' bytes.
    """

    training: str
    rank: int
    steps: int
    samples_per_step: int
    parts_ms: Sequence[float]
    percentiles_ms: Sequence[float]
    accuracy: float
    weights_hash: str
    weights: Sequence[NDArray[Any]]

    @property
    def step_ms(self) -> float:
        """Time of an average step."""
        return sum(self.parts_ms)

    @property
    def samples_per_s(self) -> float:
        """This rank's samples per second."""
        return self.samples_per_step / (self.step_ms / 1000)


def read_ranks(directory: Path, world_size: int) -> list[RankResult]:
    """Reads the files of the script's ranks.

    Raises:
        OSError: The file of a rank is missing.
    """
    results = []
    for rank in range(world_size):
        facts = json.loads((directory / f"rank-{rank}.json").read_text())
        with np.load(directory / f"rank-{rank}.npz") as file:
            results.append(RankResult(**facts, weights=[file[name] for name in file.files]))
    return results


@dataclass(frozen=True)
class Results:
    """The three trainings by rank; only that of TensorFlow's strategy can be missing."""

    gradring: Sequence[RankResult]
    mirrored: Sequence[RankResult]
    single: RankResult

    @property
    def ranks(self) -> list[RankResult]:
        """All processes, in the order of table and picture."""
        return [*self.gradring, *self.mirrored, self.single]

    @property
    def largest_difference(self) -> float:
        """Largest difference of a weight of rank 0 from the single process's."""
        pairs = zip(self.gradring[0].weights, self.single.weights, strict=True)
        differences = [np.max(np.abs(x.astype(np.float64) - y), initial=0) for x, y in pairs]
        # Unlike Python's max, numpy's returns NaN if there is one.
        return float(np.max(differences))


def checks(results: Results) -> Iterator[tuple[bool, str]]:
    """Yields whether each requirement is met, with a sentence."""
    first, single = results.gradring[0], results.single
    hashes = [rank.weights_hash for rank in results.gradring]
    if len(set(hashes)) == 1:
        yield True, f"Both ranks hold bit-identical weights (SHA-256 {hashes[0]}...)."
    else:
        listed = ", ".join(f"rank {i} {text}..." for i, text in enumerate(hashes))
        yield False, f"The ranks hold different weights: SHA-256 {listed}."
    yield (
        first.accuracy >= REQUIRED_ACCURACY,
        f"The test accuracy is {first.accuracy:.3f}; it must be at least {REQUIRED_ACCURACY}, and "
        f"the single process reached {single.accuracy:.3f}.",
    )
    yield (
        (difference := results.largest_difference) <= LARGEST_DIFFERENCE,
        f"After all {first.steps} steps no weight differs by more than {difference:.1e} from the "
        f"single process on the combined batches; {LARGEST_DIFFERENCE:.0e} is allowed.",
    )


def table(results: Results) -> str:
    """Returns a table with one row per process, followed by the meaning of each column."""
    lines = [HEADER]
    for rank in results.ranks:
        is_split = rank.training != MIRRORED
        compute, communication, waiting = (
            f"{part:.2f}" if is_split else "-" for part in rank.parts_ms
        )
        lines.append(
            f"{rank.training:<21}  {rank.rank:>4}  {rank.samples_per_s:>9,.0f}  "
            f"{rank.step_ms:>7.2f}   {compute:>7}   {communication:>13}   {waiting:>7}  "
            f"{'  '.join(f'{ms:>6.2f}' for ms in rank.percentiles_ms)}  {rank.weights_hash}"
        )
    return "\n".join([*lines, "", COLUMNS])


def comparison(results: Results, why_no_mirrored: str | None) -> str:
    """Returns a paragraph that compares the trainings, with the limits of the comparison."""
    sentences = []
    if results.mirrored:
        ours_ms, theirs_ms = (
            float(np.mean([rank.step_ms for rank in ranks]))
            for ranks in (results.gradring, results.mirrored)
        )
        sentences.append(
            f"MultiWorkerMirroredStrategy takes {theirs_ms:.2f} ms per step of the same script, "
            f"gradring {ours_ms:.2f} ms: a ratio of {theirs_ms / ours_ms:.1f}."
        )
    elif why_no_mirrored is not None:
        sentences.append(
            f"There is no comparison with MultiWorkerMirroredStrategy: {why_no_mirrored}"
        )
    workers, single = len(results.gradring), results.single.samples_per_s
    total = sum(rank.samples_per_s for rank in results.gradring)
    sentences.append(
        f"{workers} workers with one thread each train {total / single:.2f} times as many "
        f"samples/s as one process with {workers} threads. On this machine's "
        f"{_cores()}, this shows overhead, not scaling."
    )
    return textwrap.fill(" ".join(sentences), WIDTH)


def _cores() -> str:
    return counted(len(os.sched_getaffinity(0)), "core")


def draw(results: Results, directory: Path) -> Path:
    """Writes the picture into the directory and returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    path = directory / PICTURE
    names = [f"{rank.training}, rank {rank.rank}" for rank in results.ranks]
    widths = [
        [0.0, 0.0, 0.0, rank.step_ms] if rank.training == MIRRORED else [*rank.parts_ms, 0.0]
        for rank in results.ranks
    ]
    with drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(11, 3.6), layout="constrained")
        ends = np.zeros(len(names))
        for (label, colour), lengths in zip(PARTS.items(), np.transpose(widths), strict=True):
            axes.barh(names, lengths, 0.66, ends, color=colour, label=label)
            ends += lengths
        for position, end in enumerate(ends):
            axes.text(end, position, f" {end:.2f} ms", va="center")
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("milliseconds per step")
        axes.set_title(
            f"One step of {results.single.samples_per_step} images: {len(results.gradring)} "
            f"workers with one thread each, on a machine with {_cores()}"
        )
        axes.legend(loc="upper center", bbox_to_anchor=(0.43, -0.2), ncols=len(PARTS))
        figure.savefig(path, dpi=130)
    return path
