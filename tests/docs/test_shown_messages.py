"""Every message of gradring's that a page shows is one that the sources can say.

Slow blocks of commands run in `make test-all` only; what they show is read here in every run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from test_troubleshooting import CODE

from support.documents import ROOT, blocks

PACKAGE = ROOT / "python" / "gradring"
#: A line of the launcher, and a message of an exception to the end of its block.
LAUNCHER = re.compile(r"^gradring run: (?P<said>.+)$", re.MULTILINE)
EXCEPTION = re.compile(
    r"^(?P<rank>\[\w+\] )?gradring\.errors\.\w+: (?P<said>.+(?:\n(?!\[|gradring|\.\.\.).+)*)",
    re.MULTILINE,
)
#: What stands between the words of a message: other parts of it, calls, names and numbers.
BETWEEN = re.compile(
    r"\.\.\.|[:;] | by \w+Error: [^;]*|, (?=after)|\w+\(\w+\) '[^']*' \w+\[\d*\]|'[^']*'|"
    r"gradring \w+Error|\(?collective #\d+\)?|rank \d+ on [\w-]+|\bstep \d+|\w*\d[\w,.]*"
)
#: Stands for a value in a sentence, which is a few words.
VALUE = "\0"
HOLE = r"(?:[^ (]+ ){1,6}"
#: As much of a sentence is the same by no accident.
CERTAIN_BYTES = 9


def shown(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Where a block of text has a message, and the message as one line."""
    return [
        (str(block), " ".join(found["said"].split()))
        for block in blocks()
        if block.language == "text"
        for found in pattern.finditer(block.text)
    ]


def sentences(files: Sequence[Path]) -> set[tuple[str, ...]]:
    """What string literals of Python have between the values that they are filled with."""
    return {
        literal
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if len(literal := between_values(node)) > 1 or literal[0]
    }


def between_values(node: ast.AST) -> tuple[str, ...]:
    parts = [""]
    for value in node.values if isinstance(node, ast.JoinedStr) else [node]:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            parts[-1] += value.value
        elif isinstance(value, ast.FormattedValue):
            parts.append("")
    return tuple(parts)


def words(text: str) -> list[str]:
    return re.findall(rf"[\w.{VALUE}/-]+|\(", text)


def pattern(sentence: tuple[str, ...]) -> re.Pattern[str] | None:
    """Matches a sentence, which may be cut short behind words that are certainly its own."""
    certain, text, optional = 0, "", 0
    known = words(f" {VALUE} ".join(sentence).removeprefix("gradring run: "))
    for word in known:
        piece = HOLE if VALUE in word else f"{re.escape(word)} "
        if certain >= CERTAIN_BYTES:
            piece, optional = f"(?:{piece}", optional + 1
        text, certain = text + piece, certain + (VALUE not in word and len(word))
    if certain < CERTAIN_BYTES:
        return None
    return re.compile(text + "(?:[^ ]+ )*" * known[-1].startswith(VALUE) + ")?" * optional)


def says(sentence: re.Pattern[str], text: str) -> bool:
    """Whether a text, which may be cut short by ``...``, is this sentence."""
    whole, _, _ = text.partition("...")
    whole = "".join(f"{word} " for word in words(whole))
    return sentence.fullmatch(whole) is not None


def pieces(message: str) -> Iterator[str]:
    for piece in BETWEEN.split(message):
        if len(piece.split()) > 1:
            yield piece.strip(" ,()")


OF_LAUNCHER = [
    found
    for sentence in sentences(
        [*(PACKAGE / "launch").glob("*.py"), *(PACKAGE / "tools" / "cli").glob("*.py")]
    )
    if (found := pattern(sentence)) is not None
]


@pytest.mark.parametrize(("where", "said"), shown(LAUNCHER))
def test_a_line_of_the_launcher_is_one_that_it_says(where: str, said: str) -> None:
    assert any(says(sentence, said) for sentence in OF_LAUNCHER), f"{where}: {said}"


@pytest.mark.parametrize(("where", "said"), shown(EXCEPTION))
def test_the_message_of_an_exception_is_one_that_the_code_says(where: str, said: str) -> None:
    for piece in pieces(said):
        assert piece in CODE, f"{where}: {piece!r} is not in the code any more"


def test_messages_are_found_and_others_are_found_out() -> None:
    assert len(shown(LAUNCHER)) > 2 and len(shown(EXCEPTION)) > 4
    ended = pattern(("", " has ended (", "); ", " must end"))
    assert ended is not None
    assert says(ended, "rank 1 has ended (killed); 1 process must end")
    assert says(ended, "rank 1 has ended (killed); ...")
    assert not says(ended, "rank 1 failed (killed); ...")
    assert not any(says(each, "rank 1 failed (killed by SIGKILL); ...") for each in OF_LAUNCHER)
    assert [*pieces("rank 1 on vm: no such words; not these either")] == [
        "no such words",
        "not these either",
    ]
