"""The pages of the API are what signatures and docstrings say, and have all public names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import api_pages
from test_imports import PUBLIC

FILES = api_pages.files()
TEXT = "\n".join(FILES.values())


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_page_shows_what_the_sources_say(file: Path) -> None:
    assert file.read_text() == FILES[file], "type: make api"


def test_there_are_no_other_pages() -> None:
    assert {*api_pages.FOLDER.iterdir()} == {*FILES} - {api_pages.INDEX}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_its_place(module: str) -> None:
    missing = [
        name
        for name in PUBLIC[module].split()
        if not re.search(rf"^##+ `{module}\.{name}`$", TEXT, re.MULTILINE)
        and f"{module}.{name}" not in api_pages.MODULES
        and module != f"gradring.tensorflow.{name}"  # a file that has the name of its function
    ]
    # They are modules that have no names of their own, or have pages elsewhere.
    assert set(missing) <= {"data", "keras"}, missing


def test_every_link_of_a_page_leads_to_a_heading() -> None:
    for file, text in FILES.items():
        for page, anchor in re.findall(r"\]\(([\w/.-]+\.md)#(\w+)\)", text):
            place = (file.parent / page).resolve()
            headings = re.findall(r"^#+ `(.*)`$", FILES.get(place, ""), re.MULTILINE)
            if place in FILES:
                assert anchor in {heading.replace(".", "").lower() for heading in headings}


def test_nothing_of_a_docstring_is_lost() -> None:
    page = FILES[api_pages.FOLDER / "groups.md"]
    assert "    wire_dtype: WireDtype | None = None,\n" in page
    assert "* `stall_warning`: Seconds without any movement" in page
    assert "* `RendezvousError`: The group did not form in time" in page
    assert "    x: NDArray[D],\n    *,\n    out: NDArray[D] | None = None,\n" in page
    assert "    slowest: SlowestRank | None\n" in page
    # The first colon of what a function returns ends no type.
    assert "Part `rank` of `numpy.array_split(reduced, world_size)`: the first axis is" in page
    assert not re.search(r"\*\*(?:Returns|Yields)\*\*\n\n[^A-Z`]", TEXT)


def test_examples_stand_below_what_they_show() -> None:
    for entry in re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[1:]:
        parts = re.findall(r"^\*\*(\w+)\*\*$", entry, re.MULTILINE)
        assert "Example" not in parts[:-1], entry


def test_a_page_is_markdown_and_names_nothing_private() -> None:
    assert not re.search(r"^(?:=== *|:+$)", TEXT, re.MULTILINE)
    assert not re.search(r"= (?:\w+\.)?[A-Z]+_[A-Z_]+[,)]", TEXT)
    assert "    bucket_bytes: int = 16 * 1024 * 1024,\n" in TEXT
    assert "* `*args`: Arguments for every rank; pickled." in TEXT
    assert "[observability](../observability.md) defines its times." in TEXT
