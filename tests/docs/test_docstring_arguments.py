"""Every parameter of a public name stands in its docstring, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe
import pytest
from api_names import CALLED_BY_KERAS, documented, sections

#: Kinds of a docstring's sections. A dataclass or an exception keeps its arguments as attributes.
ARGUMENTS = ("parameters", "other parameters")
ATTRIBUTES = ("attributes",)
#: A class whose docstring says so in its first paragraph is not made by programs.
RETURNED = "returned by"


def is_called(path: str, one: Any) -> bool:
    """Whether a program passes the arguments."""
    name = path.rpartition(".")[2]
    # Keras passes them to a callback, and describes them.
    if name.startswith(CALLED_BY_KERAS):
        return False
    if one.is_function:
        return "property" not in one.labels
    return bool(one.is_class and RETURNED not in first_paragraph(one))


def first_paragraph(one: Any) -> str:
    return one.docstring.value.partition("\n\n")[0] if one.has_docstring else ""


def parameters_of(one: Any) -> set[str]:
    """Names of the parameters; of a class, those of its constructor."""
    called = constructor_of(one) if one.is_class else one
    if called is None:
        return set()
    return {each.name for each in called.parameters} - {"self", "cls"}


def constructor_of(one: Any) -> Any:
    """The constructor, which a base may define; None if no base in gradring does."""
    made = one.all_members.get("__init__")
    return made.final_target if made is not None and made.is_alias else made


def described_at(one: Any) -> set[str]:
    """Names that the docstring describes.

    A class can describe its parameters, or its constructor can. Attributes of a base are those of
    the class too, such as the facts of an error.
    """
    if one.is_function:
        return described(one)
    made = constructor_of(one)
    places = [one] if made is None else [one, made, made.parent]
    return set().union(
        *(described(place) for place in places),
        *(described(base, ATTRIBUTES) for base in one.mro()),
    )


def described(one: Any, kinds: tuple[str, ...] = ARGUMENTS + ATTRIBUTES) -> set[str]:
    """Names in the sections of one docstring."""
    parts = [part for kind in kinds for part in sections(one, kind)]
    return {each.name.lstrip("*") for part in parts for each in part if each.description.strip()}


def undescribed(entries: dict[str, Any]) -> Iterator[str]:
    for path, one in entries.items():
        if missing := sorted(parameters_of(one) - described_at(one)):
            yield f"{path}: no line for {', '.join(missing)} in Args"


def unknown(entries: dict[str, Any]) -> Iterator[str]:
    for path, one in entries.items():
        own = [one.members["__init__"]] if one.is_class and "__init__" in one.members else []
        lines = set().union(*(described(place, ARGUMENTS) for place in (one, *own)))
        if gone := sorted(lines - parameters_of(one)):
            yield f"{path}: Args has {', '.join(gone)}, which it does not take"


#: By their paths, the functions, methods and classes of the public modules.
CALLED = {path: one for path, one in documented().items() if is_called(path, one)}


def test_every_parameter_is_described() -> None:
    assert {"gradring.init", "gradring.Communicator.reduce", "gradring.errors.ConfigError"} <= {
        *CALLED
    }
    assert not list(undescribed(CALLED))


def test_no_other_parameter_is_described() -> None:
    assert not list(unknown(CALLED))


@pytest.mark.parametrize("path", ["gradring.init", "gradring.Communicator"])
def test_settings_of_a_group_are_described_one_by_one(path: str) -> None:
    one = CALLED[path]
    settings = {"streams", "checksum", "rack", "stall_timeout", "stall_warning"}
    assert settings <= parameters_of(one) & described_at(one)


SOURCE = '''
class Failure(Exception):
    """A failure.

    Attributes:
        rank: The rank.
    """

    def __init__(self, rank, text):
        """Makes the message.

        Args:
            text: The message.
        """

class Late(Failure):
    """A failure after a time limit."""

class Early(Failure):
    """A failure before a start.

    Args:
        begin: The start in an earlier version.
    """

    def __init__(self, rank, start): ...

class Handle:
    """A handle, returned by `begin`."""

    def __init__(self, native): ...

class Callback:
    """A callback."""

    def on_epoch_end(self, epoch): """Writes a file."""

def begin(name, size=0, *rest, **more):
    """Begins.

    Args:
        name: A name.
        *rest: The rest.
        past: A parameter of an earlier version.
    """
'''


def test_missing_and_surplus_lines_are_found() -> None:
    options: Any = {"warnings": False}
    with griffe.temporary_visited_module(
        SOURCE, docstring_parser="google", docstring_options=options
    ) as module:
        entries = {
            f"{name}.{inner}" if inner else name: member
            for name, one in module.members.items()
            for inner, member in [("", one), *(one.members.items() if one.is_class else ())]
            if not inner.startswith("_")
        }
        called = {path: one for path, one in entries.items() if is_called(path, one)}
        assert list(called) == ["Failure", "Late", "Early", "Callback", "begin"]
        assert list(undescribed(called)) == [
            "Early: no line for start in Args",
            "begin: no line for more, size in Args",
        ]
        assert list(unknown(called)) == [
            "Early: Args has begin, which it does not take",
            "begin: Args has past, which it does not take",
        ]
