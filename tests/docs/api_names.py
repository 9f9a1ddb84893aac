"""Public names and their docstrings, read from the sources as the pages of docs/api/ read them."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe
import yaml

from support.documents import ROOT

#: Beginnings of the names of methods that Keras calls.
CALLED_BY_KERAS = ("on_train_", "on_epoch_", "on_test_")
#: A module on a page of docs/api/, and how it is shown there.
BLOCK = re.compile(r"^::: (\S+)\n((?: {4}.*\n)*)", re.MULTILINE)
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
OPTIONS: dict[str, dict[str, Any]] = {
    module: yaml.safe_load(textwrap.dedent(text) or "{}").get("options", {})
    for page in PAGES.values()
    for module, text in BLOCK.findall(page)
}
#: By module, its page.
MODULES: dict[str, str] = {
    module: page for page, text in PAGES.items() for module, _ in BLOCK.findall(text)
}


@functools.cache
def package() -> Any:
    """The package, as mkdocstrings has it with the options of mkdocs.yml."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (plugin,) = (each for each in site["plugins"] if "mkdocstrings" in each)
    options = plugin["mkdocstrings"]["handlers"]["python"]["options"]
    extensions = griffe.load_extensions(*(str(ROOT / each) for each in options["extensions"]))
    return griffe.load(
        "gradring",
        search_paths=[ROOT / "python"],
        extensions=extensions,
        resolve_aliases=True,
        allow_inspection=options["allow_inspection"],
        docstring_parser="google",
        docstring_options=options["docstring_options"],
    )


def module_of(path: str) -> str:
    """The public module of a path: the longest that it begins with."""
    return max((each for each in MODULES if f"{path}.".startswith(f"{each}.")), key=len)


def module_at(path: str) -> Any:
    """A module of the package."""
    return package()[path.partition(".")[2]] if "." in path else package()


def exported(module: str) -> list[str]:
    """All that `__all__` lists; without one, the public functions and classes defined there."""
    found = module_at(module)
    return [str(name) for name in found.exports or ()] or [
        name
        for name, one in found.members.items()
        if one.is_public and (one.is_class or one.is_function)
    ]


@functools.cache
def documented() -> dict[str, Any]:
    """By path, what has an entry on a page: modules, their names, and the members of classes."""
    return {path: one for module in MODULES for path, one in _documented_at(module)}


def _documented_at(module: str) -> Iterator[tuple[str, Any]]:
    yield module, module_at(module)
    options = OPTIONS[module]
    for name in options.get("members", exported(module)):
        one = _target(module_at(module).members[name])
        if one.is_module:
            continue
        yield f"{module}.{name}", one
        if one.is_class:
            inherited = one.inherited_members if options.get("inherited_members") else {}
            for member, each in {**inherited, **one.members}.items():
                each = _target(each)
                is_public = each.has_docstring and not member.startswith("_")
                # A native class has no docstrings: that of the class describes its call.
                if is_public or (member == "__call__" and member in one.members):
                    yield f"{module}.{name}.{member}", each


def _target(one: Any) -> Any:
    return one.final_target if one.is_alias else one


def sections(one: Any, kind: str) -> list[Any]:
    """The parts of a docstring that are of a kind, such as ``parameters``."""
    if not one.has_docstring:
        return []
    return [each.value for each in one.docstring.parsed if each.kind.value == kind]


def examples() -> dict[str, str]:
    """By path, the examples of a docstring, as a session of Python."""
    found = {
        path: "\n\n".join(text for part in sections(one, "examples") for _, text in part)
        for path, one in documented().items()
    }
    return {path: text for path, text in found.items() if text}
