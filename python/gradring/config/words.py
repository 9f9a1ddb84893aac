"""Words of messages: singular and plural, suggestions for unknown names, and the pages' address."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Similarity that a suggestion needs on a command line, where the user sees at once whether it
#: fits.
ALIKE = 0.6
#: Address of the pages for users.
PAGES = "https://github.com/gradring/gradring/blob/main/docs"


def agreed(number: int, one: str, several: str) -> str:
    """Returns the word that agrees with a number: ``has`` or ``have``."""
    return one if number == 1 else several


def counted(number: int, noun: str) -> str:
    """Returns ``1 rank`` or ``3 ranks``, ``1 process`` or ``3 processes``."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{agreed(number, '', ending)}"


def listed(names: Iterable[object]) -> str:
    """Returns ``a``, ``a and b`` or ``a, b and c``; there is at least one name."""
    *first, last = map(str, names)
    return f"{', '.join(first)} and {last}" if first else last


def ranks(numbers: Iterable[int]) -> str:
    """Returns ``rank 3`` or ``ranks 0, 1 and 2``, in growing order; there is at least one."""
    numbers = sorted(numbers)
    return f"{agreed(len(numbers), 'rank', 'ranks')} {listed(numbers)}"


def meant(name: str, known: Iterable[str], cutoff: float = 0.8, *, prefix: str = "") -> str | None:
    """Returns the name in ``known`` most similar to ``name``, or None.

    ``cutoff`` is the least similarity, from 0 to 1, as in `difflib.get_close_matches`. A common
    ``prefix`` is not compared, because it would make all names similar.
    """
    whole = {each.removeprefix(prefix): each for each in known}
    near = difflib.get_close_matches(name.removeprefix(prefix), whole, n=1, cutoff=cutoff)
    return whole[near[0]] if near else None


def did_you_mean(name: str | None) -> str:
    """Returns the end of a sentence about an unknown name; empty without a suggestion."""
    return "" if name is None else f"; did you mean {name}?"
