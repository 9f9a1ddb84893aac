"""Lateness: how long ranks keep each other waiting, computed from the waits of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Seconds by the rank that waited and the rank that it waited for.
Waits = Mapping[int, Mapping[int, float]]


@dataclass(frozen=True)
class Slowest:
    """The rank with the largest skew."""

    rank: int
    #: Skew: longest wait of another rank for this rank, minus this rank's own waits.
    skew_s: float


def made_wait_s(waits: Waits, rank: int) -> float:
    """Returns the longest wait of another rank for ``rank``, in seconds.

    If all ranks exchange messages with each other, all of them wait for a late one. On a ring, only
    its successor waits at first. The longest wait is right in both cases.
    """
    return max((by.get(rank, 0.0) for waiter, by in waits.items() if waiter != rank), default=0.0)


def skew_s(waits: Waits, rank: int) -> float:
    """Returns the skew of a rank: how long it made others wait, minus its own waits.

    If ranks take turns being late, their skews cancel.
    """
    return made_wait_s(waits, rank) - sum(waits.get(rank, {}).values())


def slowest(waits: Waits, ranks: Sequence[int]) -> Slowest | None:
    """Returns the rank with the largest skew; None if no skew is above 0."""
    found = max(
        (Slowest(rank, skew_s(waits, rank)) for rank in ranks), key=lambda found: found.skew_s
    )
    return found if found.skew_s > 0 else None
