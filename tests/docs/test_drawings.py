"""The drawings in docs/images are those that docs/drawings.py makes, and pages show them."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from types import ModuleType

import pytest

from documents import ROOT


def module() -> ModuleType:
    """docs/drawings.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


DRAWINGS = module()


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
