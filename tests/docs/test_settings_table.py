"""The table of settings has every variable that the code reads, and the page shows it."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import gradring
from gradring.config.settings import GROUP, READ, SETTINGS, variables
from gradring.config.values import DEFAULTS, Transport, WireDtype
from gradring.tools.cli import run
from settings_tables import PAGE, STUB, markdown, types, written_into
from support.documents import DOCUMENTS, ROOT

TABLE = ROOT / "rust" / "net" / "src" / "config.rs"
#: Of this build and of tests, not of users.
OF_TESTS = {"GRADRING_RAY_PYTHON"}
#: What `init()` takes as an argument only.
ARGUMENTS_ONLY = {"listen", "announce"}

IN_TABLE = {setting.variable for setting in SETTINGS}


def sources() -> Iterator[Path]:
    """What is in the wheel, without tests that stand in files of their own."""
    yield from (ROOT / "python").rglob("*.py")
    for file in ROOT.glob("rust/*/src/**/*.rs"):
        if file != TABLE and file.name != "tests.rs" and "tests" not in file.parts:
            yield file


def test_the_code_reads_what_the_table_has() -> None:
    assert TABLE.is_file()
    read = {
        name
        for file in sources()
        for name in re.findall(r"""["'](GRADRING_[A-Z_]+)["']""", file.read_text())
    }
    assert read - IN_TABLE == set(), "give each a row of rust/net/src/config.rs"
    by_table = {name for setting in READ.values() for name in variables(setting.name)}
    assert IN_TABLE - read - by_table == set(), "nobody reads these"
    assert len(IN_TABLE) == len(SETTINGS)


def test_messages_and_documents_name_no_other_variables() -> None:
    for file in [*sources(), *DOCUMENTS]:
        named = set(re.findall(r"\bGRADRING_[A-Z_]*[A-Z]\b(?!_)", file.read_text()))
        assert named - IN_TABLE - OF_TESTS == set(), file


@pytest.mark.parametrize(("name", "type_"), [("transport", Transport), ("wire_dtype", WireDtype)])
def test_types_of_arguments_have_the_choices_of_the_table(name: str, type_: object) -> None:
    assert list(get_args(type_)) == READ[name].choices


@pytest.mark.parametrize(("file", "table"), [(PAGE, markdown()), (STUB, types())])
def test_page_and_stub_show_the_table(file: Path, table: str) -> None:
    text = file.read_text()
    assert text.count(table) == 1
    assert text == written_into(text, table), "type: make settings"


def test_arguments_and_defaults_are_those_of_the_table() -> None:
    arguments = {setting.name for setting in SETTINGS if setting.argument}
    parameters = inspect.signature(gradring.init).parameters
    assert arguments == set(parameters) - ARGUMENTS_ONLY
    of_communicator = inspect.signature(gradring.Communicator).parameters
    for setting in GROUP:
        assert parameters[setting.name].default is None
        default = of_communicator[setting.name].default
        assert default in (None, getattr(DEFAULTS, setting.name)), setting


def test_the_page_has_every_option_of_run() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    run.add_arguments(parser)
    rows = re.findall(r"^\| (`-.*?) \|", PAGE.read_text(), re.MULTILINE)
    shown = {option for row in rows for option in re.findall(r"`(-[-\w]+)", row)}
    assert shown == {option for action in parser._actions for option in action.option_strings}


def test_no_line_of_the_page_is_too_long() -> None:
    assert max(map(len, PAGE.read_text().splitlines())) <= 120
