"""Plain words in comments and docstrings of Rust and Python, as pages have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_words import hard, sentences

from support.documents import ROOT

CRATES = sorted(path.parent for path in (ROOT / "rust").glob("*/Cargo.toml"))
PACKAGES = sorted(path.parent for path in (ROOT / "python").glob("*/**/__init__.py"))
#: Number of hard sentences and of fragments that a folder may have: lower a number, never raise it.
HARD: dict[str, int] = {}
FRAGMENTS: dict[str, int] = {}
#: Words that begin a fragment more often than a sentence.
FRAGMENT = re.compile(r"(?:Of|Whether|What|Who|Which|Where|By|From|To|Until)\b")
_COMMENT = {
    ".rs": re.compile(r"\s*(?:///|//!|//)(?: |$)(.*)"),
    ".py": re.compile(r"\s*#:?(?: |$)(.*)"),
}
#: A parameter, attribute or error of a docstring's section, which is like an item of a list.
_ENTRY = re.compile(r"^( *)(?:\*\*?|`)?[\w.`]+(?: \([^)]*\))?: ", re.MULTILINE)
#: Headings of sections and the borders of tables in reStructuredText.
_MARKS = re.compile(r"^ *(?:Args|Raises|Returns|Attributes|Yields|Note):$", re.MULTILINE)


def comments(path: Path) -> Iterator[str]:
    """The blocks of comments, and the docstrings, of a file."""
    text = path.read_text()
    pattern, block = _COMMENT[".rs" if path.suffix == ".rs" else ".py"], list[str]()
    for line in [*text.splitlines(), ""]:
        match = pattern.match(line)
        if match:
            block.append(match[1])
        elif block:
            yield "\n".join(block)
            block = []
    if path.suffix != ".rs":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield prose(ast.get_docstring(node) or "")


def prose(docstring: str) -> str:
    """A docstring as Markdown: without examples and tables, its entries as items of lists."""
    text = docstring.split("Examples:")[0].replace("``", "`")
    parts = [part for part in text.split("\n\n") if not part.lstrip().startswith("====")]
    return _ENTRY.sub(r"\1* it: ", _MARKS.sub("", "\n\n".join(parts)))


def fragments(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        if FRAGMENT.match(sentence) and not sentence.endswith("?"):
            yield sentence


def sources(folder: Path) -> list[Path]:
    is_crate = (folder / "Cargo.toml").exists()
    paths = folder.rglob("*.rs") if is_crate else [*folder.glob("*.py"), *folder.glob("*.pyi")]
    return sorted(path for path in paths if "target" not in path.parts)


@pytest.mark.parametrize(
    "folder", [*CRATES, *PACKAGES], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_comments_are_easy_to_read(folder: Path) -> None:
    name = folder.relative_to(ROOT).as_posix()
    texts = [(path, text) for path in sources(folder) for text in comments(path)]
    found = [f"{path}: {said}" for path, text in texts for said in hard(text)]
    assert len(found) <= HARD.get(name, 0), "\n".join(found)
    found = [f"{path}: {said}" for path, text in texts for said in fragments(text)]
    assert len(found) <= FRAGMENTS.get(name, 0), "\n".join(found)
