"""The documents' fenced blocks: programs, commands and what they print.

A comment before a block says how it is treated; without one, it must run and end well::

    <!-- not run: needs Slurm; tests/engines/test_slurm_cluster.py runs it -->
    <!-- fails: the program is wrong, and every rank says so -->
    <!-- any outcome: depends on the other jobs of this machine -->
    <!-- slow: starts TensorFlow twice -->

Every name of a block of Python must be imported or defined in it, but for those that the comment of
one that is not run declares::

    <!-- not run: tests/tensorflow/test_live_line.py fits a model with it; given: model, batches -->

A block of text after commands is what they print, one line for each of its lines; ``...`` stands
for anything, and the hosts may have other names. Before it may stand::

    <!-- numbers vary: they are times of one machine -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    document
    for pattern in (
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/**/*.md",
    )
    for document in ROOT.glob(pattern)
)
MARKS = ("not run", "fails", "any outcome", "slow", "numbers vary")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)$")
_MARK = re.compile(rf"^ *<!-- (?P<mark>{'|'.join(MARKS)}): (?P<reason>.*) -->$")
_NAME = re.compile(r"^# (\w+\.py)$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    document: str
    section: str
    line: int
    language: str
    text: str
    mark: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def program(self) -> tuple[str, str] | None:
        """File name and text, if the first line names a file; of a diff, its new side."""
        lines = self.text.splitlines()
        if self.language == "diff":
            lines = [line[2:] for line in lines if not line.startswith("- ")]
        elif self.language != "python":
            return None
        name = _NAME.match(lines[0])
        return (name[1], "\n".join(lines[1:]) + "\n") if name else None

    @property
    def source(self) -> str | None:
        """The text, if it is Python; of a diff of a program, its new side."""
        if self.language == "python":
            return self.text
        return self.program[1] if self.program else None

    @property
    def given(self) -> list[str]:
        """What a block of Python that is not run uses, and does not define."""
        return re.findall(r"\w+", self.reason.partition("given:")[2])

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip()]


def blocks() -> list[Block]:
    """All blocks of all documents."""
    return [block for document in DOCUMENTS for block in blocks_of(document)]


def blocks_of(document: Path) -> Iterator[Block]:
    """The blocks of one document, in its order."""
    lines = document.read_text().splitlines()
    name = document.relative_to(ROOT).as_posix()
    section, before, at = "", "", 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            if lines[at].startswith("## "):
                section = lines[at].removeprefix("## ")
            before, at = lines[at], at + 1
            continue
        end = lines.index(f"{opening['indent']}```", at + 1)
        mark = _MARK.match(before)
        yield Block(
            name,
            section,
            at + 1,
            opening["language"],
            textwrap.dedent("\n".join(lines[at + 1 : end])),
            mark["mark"] if mark else None,
            mark["reason"] if mark else "",
        )
        before, at = "", end + 1


def programs() -> dict[str, str]:
    """The documents' programs by their file names, which are different."""
    named = [block.program for block in blocks() if block.program]
    assert len(named) == len(dict(named)), "two programs have one name"
    return dict(named)


def make_targets() -> set[str]:
    """What `make` can be asked for."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
