"""Results of the demo's trainings, read from their files, and the checks on them.

Times exclude the first step, which builds the graphs, as in `gradring.Monitor`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.observe.step_report import Totals

HASH_DIGITS = 16
WORKERS = 2
REQUIRED_ACCURACY = 0.97
#: Largest accepted difference of a weight from the single process's; rounding stays below.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Variant:
    """The settings of one training."""

    strategy: str
    title: str
    world_size: int


GRADRING = Variant("gradring", "gradring", WORKERS)
MIRRORED = Variant("multi-worker-mirrored", "MultiWorkerMirrored", WORKERS)
SINGLE = Variant("single", "single process", 1)


@dataclass(frozen=True)
class RankResult:
    """The results of one process.

    ``totals`` are the monitor's. Strategies of TensorFlow have no communicator, so all of their
    time counts as compute. ``percentiles_ms`` are p50, p90 and p99 of the steps. ``local_ms`` is
    the time of the same step without a strategy.
    """

    rank: int
    host: str
    samples_per_step: int
    totals: Totals
    percentiles_ms: tuple[float, ...]
    local_ms: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    weights: tuple[NDArray[Any], ...]

    @property
    def steps(self) -> int:
        """Number of steps, including the first."""
        return len(self.losses)

    @property
    def step_ms(self) -> float:
        """Time of an average step."""
        return self.totals.ms(self.totals.elapsed_s)

    @property
    def parts_ms(self) -> tuple[float, float, float]:
        """Times of compute (with input), communication and waiting, whose sum is the step."""
        communication, waiting = (
            self.totals.ms(self.totals.comm_s),
            self.totals.ms(self.totals.wait_s),
        )
        return self.step_ms - communication - waiting, communication, waiting

    @property
    def samples_per_s(self) -> float:
        """This rank's samples per second."""
        return self.samples_per_step / (self.step_ms / 1000)

    @property
    def weights_hash(self) -> str:
        """The first digits of the SHA-256 of all weights' bytes, in the order of the model."""
        digest = hashlib.sha256()
        for weight in self.weights:
            digest.update(np.ascontiguousarray(weight).tobytes())
        return digest.hexdigest()[:HASH_DIGITS]


@dataclass(frozen=True)
class Results:
    """The three trainings by rank; only that of TensorFlow's strategy can be missing."""

    gradring: tuple[RankResult, ...]
    mirrored: tuple[RankResult, ...]
    single: RankResult
    cores: int
    #: Fraction of the processors' time used by other programs, by title of the training.
    others: Mapping[str, float]

    @property
    def largest_difference(self) -> float:
        """Largest difference of a weight of rank 0 from the single process's."""
        pairs = zip(self.gradring[0].weights, self.single.weights, strict=True)
        differences = [np.max(np.abs(x.astype(np.float64) - y), initial=0) for x, y in pairs]
        # Unlike Python's max, numpy's returns NaN if there is one.
        return float(np.max(differences))


def mean(ranks: Sequence[RankResult], name: str) -> float:
    """Returns a number averaged over ranks, which differ little since they step together."""
    return float(np.mean([getattr(rank, name) for rank in ranks]))


def read_ranks(directory: Path, world_size: int) -> tuple[RankResult, ...]:
    """Reads the files of the script's ranks.

    Raises:
        OSError: The file of a rank is missing.
    """
    return tuple(_read_rank(directory, rank) for rank in range(world_size))


def percentiles_ms(steps_s: Sequence[float]) -> tuple[float, ...]:
    """Returns p50, p90 and p99 of the durations of steps in milliseconds."""
    return tuple(1000 * float(s) for s in np.quantile(steps_s, (0.5, 0.9, 0.99)))


def _read_rank(directory: Path, rank: int) -> RankResult:
    measured = json.loads((directory / f"rank-{rank}.json").read_text())
    with np.load(directory / f"rank-{rank}.npz") as file:
        weights = tuple(file[name] for name in file.files)
    totals = Totals.from_note(measured["totals"].encode())
    assert totals is not None
    return RankResult(
        rank=measured["rank"],
        host=measured["host"],
        samples_per_step=measured["samples_per_step"],
        totals=totals,
        percentiles_ms=percentiles_ms(measured["steps_s"][1:]),
        local_ms=1000 * float(np.mean(measured["local_steps_s"][1:])),
        losses=tuple(measured["losses"]),
        accuracies=tuple(measured["accuracies"]),
        weights=weights,
    )


@dataclass(frozen=True)
class Check:
    """The outcome of one requirement, with a sentence."""

    passed: bool
    sentence: str


def checks(results: Results) -> list[Check]:
    """Returns the checks of all requirements, in the order of the report."""
    return [_identical(results), _accurate(results), _equal_to_single(results)]


def exit_code(checked: Sequence[Check]) -> int:
    """Returns 0 if all checks passed, else 1."""
    return 0 if all(check.passed for check in checked) else 1


def _identical(results: Results) -> Check:
    hashes = [rank.weights_hash for rank in results.gradring]
    if len(set(hashes)) == 1:
        return Check(True, f"Both ranks hold bit-identical weights (SHA-256 {hashes[0]}...).")
    listed = ", ".join(f"rank {i} {text}..." for i, text in enumerate(hashes))
    return Check(False, f"The ranks hold different weights: SHA-256 {listed}.")


def _accurate(results: Results) -> Check:
    reached = results.gradring[0].accuracies[-1]
    single = results.single.accuracies[-1]
    return Check(
        reached >= REQUIRED_ACCURACY,
        f"The test accuracy is {reached:.3f}; it must be at least {REQUIRED_ACCURACY}, and the "
        f"single process reached {single:.3f}.",
    )


def _equal_to_single(results: Results) -> Check:
    difference = results.largest_difference
    return Check(
        difference <= LARGEST_DIFFERENCE,
        f"After all {results.gradring[0].steps} steps no weight differs by more than "
        f"{difference:.1e} from the single process on the combined batches; "
        f"{LARGEST_DIFFERENCE:.0e} is allowed.",
    )
