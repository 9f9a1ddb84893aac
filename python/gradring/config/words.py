"""Words of sentences: one thing or several, and the name that somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: How alike a word must be where somebody is at the keyboard, who sees at once whether it fits.
ALIKE = 0.6


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


def meant(name: str, known: Iterable[str], cutoff: float = 0.8, *, prefix: str = "") -> str | None:
    """The one of ``known`` that somebody who wrote ``name`` may have meant.

    ``cutoff`` is how alike the two must be, from 0 to 1, as in `difflib.get_close_matches`. A
    ``prefix`` that all have is not compared: it would make all alike.
    """
    whole = {each.removeprefix(prefix): each for each in known}
    near = difflib.get_close_matches(name.removeprefix(prefix), whole, n=1, cutoff=cutoff)
    return whole[near[0]] if near else None


def did_you_mean(name: str | None) -> str:
    """The end of a sentence about a name that is not known; None: nothing is like it."""
    return "" if name is None else f"; did you mean {name}?"
