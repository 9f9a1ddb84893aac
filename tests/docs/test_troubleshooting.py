"""Every message on the page of troubleshooting is one that the code can say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.documents import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = [
    *(ROOT / "python" / "gradring").rglob("*.py"),
    *(path for path in (ROOT / "rust").rglob("src/**/*.rs") if "tests" not in path.name),
]


def messages(page: str) -> list[str]:
    """The first cells of all rows below "By message", where they quote."""
    _, _, rows = page.partition("\n## By message\n")
    return [
        message
        for row in re.findall(r"^\| (`.*?) \| ", rows, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
    ]


def said() -> str:
    """What the sources' string literals say, those of several lines joined."""
    return "\n".join(joined(path.read_text()) for path in SOURCES)


def joined(source: str) -> str:
    source = re.sub(r"^\s*(?://|#(?!\[)).*$", "", source, flags=re.MULTILINE)
    # The tests of a module quote messages, too.
    source = source.partition("#[cfg(test)]\nmod tests {")[0]
    # Python's adjacent literals, and Rust's lines that end in a backslash.
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)
    return re.sub(r"\\\n\s*", "", source)


def parts(message: str) -> list[str]:
    """What stands between the names and numbers."""
    return [part for part in (part.strip(" ,;") for part in message.split("...")) if part]


CODE = said()


@pytest.mark.parametrize("message", messages(PAGE.read_text()))
def test_a_message_is_one_that_the_code_says(message: str) -> None:
    for part in parts(message):
        assert part in CODE, f"{part!r} is not in the code any more"


def test_every_class_of_errors_is_on_the_page() -> None:
    errors = Path(ROOT, "python", "gradring", "errors.py").read_text()
    classes = set(re.findall(r"^class (\w+)\(", errors, re.MULTILINE)) - {"GradringError"}
    unnamed = {name for name in classes if name not in PAGE.read_text()}
    assert len(classes) >= 9
    assert not unnamed


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert messages("`x` \n## By message\n| `a ... b`, `c` | why |\n| no | `d` |\n") == [
        "a ... b",
        "c",
    ]
    assert parts("rank ... has ..., but") == ["rank", "has", "but"]
    assert joined('f"one {x} "\n    "two"\n# three\n') == 'f"one {x} two"\n\n'
    assert "nobody ever says this sentence" not in CODE
