"""Words of sentences that tell one thing from several."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """``1 rank`` or ``3 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[object]) -> str:
    """``a``, ``a and b`` or ``a, b and c``."""
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 1 and 2``, in growing order."""
    numbers = sorted(numbers)
    return f"rank{'' if len(numbers) == 1 else 's'} {listed(numbers)}"
