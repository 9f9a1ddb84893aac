"""Short lines and paragraphs and plain words in all of Markdown, and words in sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import ROOT

COLUMNS = 120
LINES = 6
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_DEVELOPERS = [
    *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs" / "internals").glob("*.md")),
]
#: What is wrong, and what to write in its place.
PLAIN = {
    r"whoever|whomever": "those who, a rank that",
    r"doors?": "the port, listens",
    r"inquests?": "asks which rank failed",
    r"testimon(?:y|ies)": "answer",
    r"remarks?": "note, comment",
    r"standstills?": "stall",
    r"callees?": "responder",
    r"(?:loops?|programs?|scripts?|tests?) of (?:one's|your) own": "custom, your",
    r"leav\w+ (?:it |them |\S+ )?away|left away": "omit",
    r"(?:is|be|are) no default": "off by default",
    r"liv\w+ shortly": "short-lived",
    r"sieges?": "a flood of callers",
    r"be had": "can be combined, is available",
    r"comes? and goe?s?": "join and leave",
    r"(?:nothing|something) to say to": "connect lazily, exchange",
    r"tried on the way|in the run after|in a fast hour": "the figure alone, with its date",
}
#: Words of a sentence in prose: with more, a reader begins it twice.
WORDS = 30
#: A clause that begins so, where a noun says who or what it is about; "such as" is none.
CLAUSE = re.compile(r"(?:^|[,;:(] )(?:(?:and|or|but) )?(?:what|who|such(?! as))\b", re.IGNORECASE)
#: What a module's head begins with, where a noun says what the module is.
NO_NOUN = re.compile(r"(?:Wh(?:at|ere|ether|ich|o|om|y)|How|That)\b")


def paragraphs(text: str) -> Iterator[list[str]]:
    """The lines of each paragraph and item of a list; neither tables nor blocks of code."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        begins = re.match(r" *([*-]|\d+\.) ", line)
        ends = not line.strip() or line.lstrip().startswith(("|", "#", "<!--", ":::"))
        if lines and (begins or ends):
            yield lines
            lines = []
        if not ends:
            lines.append(line)


def problems(text: str) -> Iterator[str]:
    """What a reader would stumble over."""
    for lines in paragraphs(text):
        # Where a link leads to is not read.
        for line in (re.sub(r"\]\([^)]*\)", "]", line) for line in lines):
            if len(line) > COLUMNS:
                yield f"{len(line)} columns: {line[:60]}"
        if len(lines) > LINES:
            yield f"{len(lines)} lines in a paragraph: {lines[0][:60]}"


def unplain(text: str) -> Iterator[str]:
    """Words that stay inside, in prose and tables; code is code."""
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    for pattern, better in PLAIN.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text.replace("\n", " "), re.IGNORECASE):
            yield f"{match[0]!r}: {better}"


def sentences(text: str) -> Iterator[str]:
    """Those of paragraphs and lists; a piece of code is one word, and a link's target none."""
    for lines in paragraphs(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)):
        prose = re.sub(r"^ *(?:[*-]|\d+\.) +", "", " ".join(line.strip() for line in lines))
        prose = re.sub(r"`[^`]+`", "code", re.sub(r"\]\([^)]*\)", "]", prose))
        prose = re.sub(r"[*_\[\]\"!]", "", prose)
        # The first letter of an author's name ends none.
        yield from re.split(r"(?<=[.!?])(?<!\([A-Z]\.)(?<!and [A-Z]\.)(?<!: [A-Z]\.) +", prose)


def hard(text: str) -> Iterator[str]:
    """Sentences that nobody should have to read twice."""
    for sentence in sentences(text):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > WORDS:
            yield f"{len(words)} words: {sentence}"
        if not sentence.endswith("?"):
            for match in CLAUSE.finditer(sentence):
                yield f"a clause begins with {match[0]!r}: {sentence}"


@pytest.mark.parametrize("page", [*PAGES, *FOR_DEVELOPERS], ids=lambda p: p.name)
def test_a_page_has_no_hard_sentence(page: Path) -> None:
    assert not (found := list(hard(page.read_text()))), "\n".join(found)


@pytest.mark.parametrize("page", [*PAGES, *FOR_DEVELOPERS], ids=lambda p: p.name)
def test_a_page_is_easy_to_read(page: Path) -> None:
    text = page.read_text()
    found = [*problems(text), *unplain(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("directory", ["rust", "python", "examples"])
def test_sources_use_the_words_of_the_glossary(directory: str) -> None:
    sources = [p for p in (ROOT / directory).rglob("*") if p.suffix in (".rs", ".py", ".pyi")]
    assert sources
    ours = re.compile(r"\b(?:whoever|standstill|inquest|testimon(?:y|ies))\b", re.IGNORECASE)
    found = {str(source): ours.findall(source.read_text()) for source in sources}
    assert not any(found.values()), {path: words for path, words in found.items() if words}


def heads() -> Iterator[tuple[str, str]]:
    """Path and first line of documentation of each module."""
    for folder in (
        "benches",
        "docs",
        "examples",
        "fuzz/targets",
        "python",
        "release",
        "rust",
        "tests",
    ):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".rs":
                found = re.match(r"(?:#!\[.*\]\n)*//! ?(.*)", path.read_text())
                head = found[1] if found else ""
            elif path.suffix in (".py", ".pyi"):
                head = ast.get_docstring(ast.parse(path.read_text())) or ""
            else:
                continue
            yield path.relative_to(ROOT).as_posix(), head.partition("\n")[0]


def test_module_heads_begin_with_a_noun() -> None:
    assert not [path for path, head in heads() if NO_NOUN.match(head)]
