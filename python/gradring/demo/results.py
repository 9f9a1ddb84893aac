"""What the processes of a training left behind, as numbers.

Times are averages over the middle half of the steps by duration, after the first epoch: the
first one builds graphs, and other programs on the machine disturb single steps. Percentiles
are of all steps after that epoch.
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

HASH_DIGITS = 16


@dataclass(frozen=True)
class Split:
    """Where the time of a step goes, in milliseconds; the parts add up to the whole."""

    compute_ms: float
    communication_ms: float
    waiting_ms: float

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.compute_ms + self.communication_ms + self.waiting_ms


@dataclass(frozen=True)
class RankResult:
    """One process.

    ``split`` is measured inside of the collectives, which only gradring's strategy allows; for
    others all time counts as compute. ``percentiles_ms`` are p50, p90 and p99 of all steps.
    ``local_ms`` is the time of the same step without a strategy.
    """

    rank: int
    host: str
    samples_per_step: int
    split: Split
    percentiles_ms: tuple[float, float, float]
    local_ms: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    weights: tuple[NDArray[Any], ...]

    @property
    def steps(self) -> int:
        """Steps trained, the first epoch included."""
        return len(self.losses)

    @property
    def samples_per_s(self) -> float:
        """This rank's part of the global batches, over the time of a step."""
        return self.samples_per_step / (self.split.step_ms / 1000)

    @property
    def added_share(self) -> float:
        """The fraction of a step that the strategy adds to the same step without it."""
        return 1 - self.local_ms / self.split.step_ms

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
    others: Mapping[str, float]
    """By title of the training: the fraction of the processors' time that other programs used."""

    @property
    def largest_difference(self) -> float:
        """Between a weight of rank 0 and that of the single process."""
        return largest_difference(self.gradring[0].weights, self.single.weights)


def read_ranks(directory: Path, world_size: int) -> tuple[RankResult, ...]:
    """Reads what `gradring.demo.recorder` wrote.

    Raises:
        OSError: A rank has written nothing.
    """
    return tuple(_read_rank(directory, rank) for rank in range(world_size))


def largest_difference(a: Sequence[NDArray[Any]], b: Sequence[NDArray[Any]]) -> float:
    """The largest absolute difference between two lists of weights of the same shapes."""
    pairs = zip(a, b, strict=True)
    # Unlike Python's max, numpy's lets a NaN win.
    return float(np.max([np.max(np.abs(x.astype(np.float64) - y), initial=0) for x, y in pairs]))


def mean_step_ms(ranks: Sequence[RankResult]) -> float:
    """The time of a step, averaged over ranks, which differ little: they step together."""
    return sum(rank.split.step_ms for rank in ranks) / len(ranks)


def split_of(steps: Sequence[Mapping[str, float]]) -> Split:
    """Averages steps as `Record` describes them.

    The time in which a step stood still for its collectives is divided as the engine's own: waiting
    for other ranks, and moving bytes.
    """
    middle = _middle_half(steps)
    duration_s, blocked_s, waiting_s, moving_s = (
        sum(step[key] for step in middle) / len(middle)
        for key in ("duration_s", "blocked_s", "waiting_s", "moving_s")
    )
    engine_s = waiting_s + moving_s
    exposed_waiting_s = blocked_s * waiting_s / engine_s if engine_s > 0 else 0.0
    return Split(
        compute_ms=1000 * (duration_s - blocked_s),
        communication_ms=1000 * (blocked_s - exposed_waiting_s),
        waiting_ms=1000 * exposed_waiting_s,
    )


def percentiles_ms(steps: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """p50, p90 and p99 of the durations of all steps."""
    durations_s = [step["duration_s"] for step in steps]
    p50, p90, p99 = (float(s) for s in np.quantile(durations_s, (0.5, 0.9, 0.99)))
    return 1000 * p50, 1000 * p90, 1000 * p99


def _middle_half(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    ordered = sorted(steps, key=lambda step: step["duration_s"])
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def _read_rank(directory: Path, rank: int) -> RankResult:
    measured = json.loads((directory / f"rank-{rank}.json").read_text())
    with np.load(directory / f"rank-{rank}.npz") as file:
        weights = tuple(file[name] for name in file.files)
    after_first_epoch = measured["steps"][measured["steps_per_epoch"] :]
    local = np.sort([seconds for epoch in measured["local_s"][1:] for seconds in epoch])
    quarter = len(local) // 4
    return RankResult(
        rank=measured["rank"],
        host=measured["host"],
        samples_per_step=measured["global_batch"] // measured["replicas"],
        split=split_of(after_first_epoch),
        percentiles_ms=percentiles_ms(after_first_epoch),
        local_ms=1000 * float(np.mean(local[quarter : len(local) - quarter])),
        losses=tuple(step["loss"] for step in measured["steps"]),
        accuracies=tuple(measured["accuracies"]),
        weights=weights,
    )
