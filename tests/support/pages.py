"""Parts of pages that a program writes, between two lines that say so."""

from __future__ import annotations


def written_between(text: str, begin: str, end: str, part: str) -> str:
    """The text with `part` in place of what stands between the lines `begin` and `end`.

    Raises:
        ValueError: It does not have them.
    """
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no {begin.strip()} ... {end.strip()} in the page")
    return f"{before}{begin}{part}{end}{after}"
