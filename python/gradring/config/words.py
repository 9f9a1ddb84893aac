"""Words of sentences that tell one thing from several."""

from __future__ import annotations

from collections.abc import Iterable


def agreed(number: int, one: str, several: str) -> str:
    """The word for so many: ``has`` or ``have``."""
    return one if number == 1 else several


def counted(number: int, noun: str) -> str:
    """``1 rank`` or ``3 ranks``, ``1 process`` or ``3 processes``."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{agreed(number, '', ending)}"


def listed(names: Iterable[object]) -> str:
    """``a``, ``a and b`` or ``a, b and c``; there is at least one."""
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 1 and 2``, in growing order; there is at least one."""
    numbers = sorted(numbers)
    return f"{agreed(len(numbers), 'rank', 'ranks')} {listed(numbers)}"
