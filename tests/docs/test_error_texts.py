"""Lengths of the texts that gradring shows: errors, warnings, reports and help."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.documents import ROOT

#: Characters of a text's first line; details follow on lines of their own.
FIRST_LINE = 300
#: Words of a sentence. An error has two parts in one sentence: the problem and the next step.
WORDS = 40
#: Longer texts, each as its file and first six words: remove an entry, never add one.
KNOWN = {
    ("gradring/tools/cli/bench.py", "Measures all-reduce between ranks of this"),
    ("gradring/tools/cli/doctor.py", "On every rank, started by gradring"),
}
PLACEHOLDER = "{}"


def text_of(node: ast.AST) -> str | None:
    """Returns the text of a string, with `{}` for each value that it formats; else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or PLACEHOLDER for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = text_of(node.left), text_of(node.right)
        return None if parts == (None, None) else "".join(part or PLACEHOLDER for part in parts)
    return None


def texts(node: ast.AST) -> Iterator[str]:
    """Yields the outermost texts of a module; docstrings and other bare strings are none."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    text = text_of(node)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def problems(text: str) -> Iterator[str]:
    """Yields what is too long in a text."""
    columns = len(text.partition("\n")[0])
    if columns > FIRST_LINE:
        yield f"{columns} characters in the first line"
    longest = max(len(each.split()) for each in re.split(r"[.!?](?:\s|$)|\n", text))
    if longest > WORDS:
        yield f"{longest} words in a sentence"


def beginning(text: str) -> str:
    """Returns the first six words of a text."""
    return " ".join(text.split()[:6])


def sources() -> Iterator[Path]:
    """Yields the files of the package and of its start hook."""
    for package in ("gradring", "gradring_start"):
        yield from sorted((ROOT / "python" / package).rglob("*.py"))


def test_texts_are_short() -> None:
    found = {
        (path.relative_to(ROOT / "python").as_posix(), beginning(text)): f"{problem}: {text}"
        for path in sources()
        for text in texts(ast.parse(path.read_text()))
        for problem in problems(text)
    }
    assert [found[key] for key in sorted(found.keys() - KNOWN)] == []
    assert KNOWN - found.keys() == set(), "remove what is short by now"
