"""The table of settings has every variable that the code reads, and the page shows it."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import gradring
from documents import DOCUMENTS, ROOT
from gradring.cli import run
from gradring.config import Settings
from gradring.settings import SETTINGS, written_into

PAGE = ROOT / "docs" / "command-line.md"
TABLE = ROOT / "python" / "gradring" / "settings.py"
#: Of this build and of tests, not of users.
OF_TESTS = {"GRADRING_RAY_PYTHON"}
#: What `init()` takes as an argument only.
ARGUMENTS_ONLY = {"listen", "announce"}

IN_TABLE = {setting.variable for setting in SETTINGS}


def sources() -> Iterator[Path]:
    """What is in the wheel, without tests that stand in files of their own."""
    yield from (file for file in (ROOT / "python").rglob("*.py") if file != TABLE)
    for file in ROOT.glob("rust/*/src/**/*.rs"):
        if file.name != "tests.rs" and "tests" not in file.parts:
            yield file


def test_the_code_reads_what_the_table_has() -> None:
    read = {
        name
        for file in sources()
        for name in re.findall(r"""["'](GRADRING_[A-Z_]+)["']""", file.read_text())
    }
    assert read - IN_TABLE == set(), "give each a row of gradring.settings.SETTINGS"
    assert IN_TABLE - read == set(), "nobody reads these"
    assert len(IN_TABLE) == len(SETTINGS)


def test_messages_and_documents_name_no_other_variables() -> None:
    for file in [*sources(), *DOCUMENTS]:
        named = set(re.findall(r"\bGRADRING_[A-Z_]*[A-Z]\b(?!_)", file.read_text()))
        assert named - IN_TABLE - OF_TESTS == set(), file


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text()
    assert page.count(f"| `{SETTINGS[0].variable}`") == 1
    assert page == written_into(page), "type: python -m gradring.settings docs/command-line.md"


def test_arguments_and_defaults_are_those_of_the_code() -> None:
    arguments = {setting.argument for setting in SETTINGS if setting.argument}
    assert arguments == set(inspect.signature(gradring.init).parameters) - ARGUMENTS_ONLY
    defaults = vars(Settings())
    for setting in SETTINGS:
        field = setting.argument or setting.variable.removeprefix("GRADRING_").lower()
        assert setting.default == defaults.get(field), setting


def test_the_page_has_every_option_of_run() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    run.add_arguments(parser)
    rows = re.findall(r"^\| (`-.*?) \|", PAGE.read_text(), re.MULTILINE)
    shown = {option for row in rows for option in re.findall(r"`(-[-\w]+)", row)}
    assert shown == {option for action in parser._actions for option in action.option_strings}


def test_no_line_of_the_page_is_too_long() -> None:
    assert max(map(len, PAGE.read_text().splitlines())) <= 120
