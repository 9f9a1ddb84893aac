"""The pages of the API have all public names, with docstrings that fit their signatures."""

from __future__ import annotations

import re

import pytest
from api_names import MODULES, PAGES, documented, exported, sections

from test_imports import PUBLIC


@pytest.mark.parametrize("module", sorted({*MODULES, *PUBLIC}))
def test_every_public_name_is_on_a_page(module: str) -> None:
    missing = [
        name
        for name in {*exported(module), *PUBLIC.get(module, "").split()}
        if f"{module}.{name}" not in documented()
        # The page says of which other module it is.
        and f"`{name}`" not in PAGES[MODULES[module]]
    ]
    # They are modules that have no names of their own, or have pages elsewhere.
    modules = {path.rpartition(".")[2] for path in MODULES}
    assert set(missing) <= modules, missing


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    names = [path for path in documented() if path.startswith(f"{module}.")]
    assert names and not [path for path in names if not documented()[path].has_docstring]


def test_docstrings_describe_the_arguments_of_their_functions() -> None:
    different = {}
    for path, one in documented().items():
        made = one.all_members.get("__init__") if one.is_class else one
        described = {each.name for part in sections(one, "parameters") for each in part}
        taken = {each.name for each in getattr(made, "parameters", ())} - {"self", "cls"}
        if described and (names := {name.lstrip("*") for name in described} ^ taken):
            different[path] = names
    assert not different


def test_the_first_words_of_a_result_are_not_taken_for_its_type() -> None:
    results = {
        path: (each, one)
        for path, one in documented().items()
        for part in sections(one, "returns")
        for each in part
    }
    assert len(results) > 40
    assert not [path for path, (each, one) in results.items() if each.annotation != one.returns]
    assert not [path for path, (each, _) in results.items() if each.name]


def test_defaults_are_values_and_no_names_of_private_constants() -> None:
    calls = [
        one.all_members.get("__init__") if one.is_class else one for one in documented().values()
    ]
    defaults = [str(each.default) for one in calls for each in getattr(one, "parameters", ())]
    assert "16 * 1024 * 1024" in defaults
    assert not [each for each in defaults if re.search(r"\b[A-Z]+_[A-Z_]+\b", each)]
