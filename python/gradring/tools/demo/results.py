"""Results of the demo: what its trainings left behind, as numbers, and what must be true of them.

Times are of all steps but the first, which builds the graphs, as `gradring.Monitor` counts them.
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
#: Bound between a weight of the workers and of the single process; rounding alone stays below.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Variant:
    """One training."""

    strategy: str
    title: str
    world_size: int


GRADRING = Variant("gradring", "gradring", WORKERS)
MIRRORED = Variant("multi-worker-mirrored", "MultiWorkerMirrored", WORKERS)
SINGLE = Variant("single", "single process", 1)


@dataclass(frozen=True)
class RankResult:
    """One process.

    ``totals`` are the monitor's. Strategies of TensorFlow have no communicator to ask, so all of
    their time counts as compute. ``percentiles_ms`` are p50, p90 and p99 of the steps. ``local_ms``
    is the time of the same step without a strategy.
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
        """Steps trained, the first included."""
        return len(self.losses)

    @property
    def step_ms(self) -> float:
        """An average step."""
        return self.totals.ms(self.totals.elapsed_s)

    @property
    def parts_ms(self) -> tuple[float, float, float]:
        """Compute (with input), communication and waiting, which add up to the step."""
        communication, waiting = (
            self.totals.ms(self.totals.comm_s),
            self.totals.ms(self.totals.wait_s),
        )
        return self.step_ms - communication - waiting, communication, waiting

    @property
    def samples_per_s(self) -> float:
        """This rank's part of the global batches, over the time of a step."""
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
    """The three trainings, by rank. Only TensorFlow's own may be missing."""

    gradring: tuple[RankResult, ...]
    mirrored: tuple[RankResult, ...]
    single: RankResult
    cores: int
    #: By title of the training: the fraction of the processors' time that other programs used.
    others: Mapping[str, float]

    @property
    def largest_difference(self) -> float:
        """Between a weight of rank 0 and that of the single process."""
        pairs = zip(self.gradring[0].weights, self.single.weights, strict=True)
        differences = [np.max(np.abs(x.astype(np.float64) - y), initial=0) for x, y in pairs]
        # Unlike Python's max, numpy's lets a NaN win.
        return float(np.max(differences))


def mean(ranks: Sequence[RankResult], name: str) -> float:
    """A number averaged over ranks, which differ little: they step together."""
    return float(np.mean([getattr(rank, name) for rank in ranks]))


def read_ranks(directory: Path, world_size: int) -> tuple[RankResult, ...]:
    """Reads what the script's ranks wrote.

    Raises:
        OSError: A rank has written nothing.
    """
    return tuple(_read_rank(directory, rank) for rank in range(world_size))


def percentiles_ms(steps_s: Sequence[float]) -> tuple[float, ...]:
    """p50, p90 and p99 of the durations of steps."""
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
    """One requirement, and a sentence that says how it went."""

    passed: bool
    sentence: str


def checks(results: Results) -> list[Check]:
    """All requirements, in the order in which they are shown."""
    return [_identical(results), _accurate(results), _equal_to_single(results)]


def exit_code(checked: Sequence[Check]) -> int:
    """0 if everything is as it must be, else 1."""
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
