"""Lateness: who keeps whom waiting, from what all ranks say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: By rank that waited, and rank that was waited for: seconds.
Waits = Mapping[int, Mapping[int, float]]


@dataclass(frozen=True)
class Slowest:
    """The rank that keeps the others waiting most."""

    rank: int
    #: How long the peer that waited most for it has waited, less what it has waited itself.
    excess_s: float


def made_wait_s(waits: Waits, rank: int) -> float:
    """How long the peer that waited most for ``rank`` has waited for it.

    Where all ranks hear from each other all of them wait for a late one; on a ring only its
    successor does at first. The largest of their times is right for both.
    """
    return max((by.get(rank, 0.0) for waiter, by in waits.items() if waiter != rank), default=0.0)


def excess_s(waits: Waits, rank: int) -> float:
    """How long ``rank`` made others wait, less what it has waited itself.

    Ranks that are late in turn come out even.
    """
    return made_wait_s(waits, rank) - sum(waits.get(rank, {}).values())


def slowest(waits: Waits, ranks: Sequence[int]) -> Slowest | None:
    """The rank of the largest excess; None if no rank waited for another."""
    found = max(
        (Slowest(rank, excess_s(waits, rank)) for rank in ranks), key=lambda found: found.excess_s
    )
    return found if found.excess_s > 0 else None
