"""The drawings in docs/images are those that docs/drawings.py makes, and pages show them."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from types import ModuleType

import pytest

from support.documents import ROOT


def module(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


DRAWINGS = module("drawings")


@pytest.mark.parametrize("name", DRAWINGS.DRAWINGS)
def test_a_drawing_is_the_one_that_the_code_makes(name: str) -> None:
    svg = DRAWINGS.DRAWINGS[name]()
    assert (ROOT / "docs" / "images" / name).read_text() == svg, "type: python docs/drawings.py"
    ElementTree.fromstring(svg)
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    assert any(f"](images/{name})" in page for page in pages)


def test_the_states_are_all_that_the_page_lists() -> None:
    page = (ROOT / "docs" / "internals" / "elastic.md").read_text()
    listed = DRAWINGS.arrows(page)
    assert len(listed) == page.count(" --> ") > 5
    assert ("Reforming", "Joining", "the others went on without it") in listed
    assert DRAWINGS.states().count('marker-end="url(#tip)"') == len(listed)


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.1."""
    digits = colour.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("name", DRAWINGS.DRAWINGS)
def test_text_on_a_fill_can_be_read_by_day_and_by_night(name: str) -> None:
    fills = dict(re.findall(r"\.(\w+) \{ fill: (#\w+); \}", DRAWINGS.STYLE))
    svg = (ROOT / "docs" / "images" / name).read_text()
    # A label stands behind its box or circle, in its middle; its class alone gives its colour.
    label = r'<text [^>]*text-anchor="middle" class="([\w ]+)"'
    on = re.findall(rf'<(?:rect|circle) class="((?!ground)\w+)"[^>]*/>\n?{label}', svg)
    assert on
    for fill, classes in on:
        colours = fills[fill], fills[classes.split()[-1]]
        dim, bright = sorted(luminance(colour) for colour in colours)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, (fill, classes)


def test_the_recorded_terminal_shows_the_commands_of_the_tutorial() -> None:
    screens = ElementTree.parse(ROOT / "docs" / "images" / "tutorial.svg").getroot()
    shown = " ".join("".join(screens.itertext()).split())
    commands = module("recording").commands()
    assert len(commands) == 3
    missing = [command for command in commands if f"$ {command}" not in shown]
    assert not missing, "type: make recording"
    # Of the machine that recorded it, only what is below the clone is shown.
    assert set(re.findall(r'File "(..)', shown)) == {"~/"}
