"""Extension of griffe, which reads signatures and docstrings for the pages of docs/api/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

#: A table of reStructuredText: in the docstring of a package, it lists modules for developers.
TABLE = re.compile(r"^=[= ]+\n(?:.+\n)*=[= ]+\n*", re.MULTILINE)
#: A mark of reStructuredText before a block, which is a block in Markdown without it.
BLOCK = re.compile(r"^(?:\.\. code-block:: \w+|::)\n\n", re.MULTILINE)
VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


class Signatures(griffe.Extension):
    """Calls that a program makes, with the values of their defaults."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Changes all modules, classes and functions of the package."""
        for one in (pkg, *_defined(pkg)):
            if isinstance(one, griffe.Module) and one.docstring is not None:
                one.docstring.value = BLOCK.sub("", TABLE.sub("", one.docstring.value))
            elif isinstance(one, griffe.Class):
                for name in [name for name in one.members if _is_pythons(one, name)]:
                    del one.members[name]
                _describe_its_making(one)
            elif isinstance(one, griffe.Function):
                one.parameters = griffe.Parameters(*_by_name(one))
                for each in one.parameters:
                    each.default = None if each.kind in VARIADIC else _value(one, each.default)


def _defined(of: griffe.Object) -> Iterator[griffe.Object]:
    """All that a module or class defines, at any depth."""
    for member in list(of.members.values()):
        if isinstance(member, griffe.Object):
            yield member
            yield from _defined(member)


def _is_pythons(of: griffe.Class, name: str) -> bool:
    """Whether it is a method that Python calls, as `__enter__`, and no program."""
    one = of.members[name]
    if name == "__init__":
        # Programs make such a thing themselves if a docstring has the arguments.
        in_class = of.docstring is not None and "Args:" in of.docstring.value
        is_error = any(str(base).endswith(("Error", "Exception")) for base in of.bases)
        return is_error or not (in_class or one.has_docstring or "dataclass" in of.labels)
    return isinstance(one, griffe.Function) and one.is_special and name != "__call__"


def _describe_its_making(of: griffe.Class) -> None:
    """Puts the arguments of `__init__` into the class's docstring, before the examples."""
    made = of.members.get("__init__")
    if made is None or made.docstring is None or of.docstring is None:
        return
    arguments = made.docstring.value.partition("\n\n")[2]
    text, examples, rest = of.docstring.value.partition("\nExamples:\n")
    of.docstring.value = f"{text}\n\n{arguments}\n{examples}{rest}"
    made.docstring = None


def _by_name(function: griffe.Function) -> Iterator[griffe.Parameter]:
    """The parameters; those of a `TypedDict` by name, in place of ``**settings``."""
    by_name: Any = griffe.ParameterKind.keyword_only
    for each in function.parameters:
        if not str(each.annotation).startswith("Unpack["):
            yield each
            continue
        annotation: Any = each.annotation
        for name, field in function.modules_collection[
            annotation.slice.canonical_path
        ].attributes.items():
            yield griffe.Parameter(name, annotation=field.annotation, kind=by_name, default="None")


def _value(function: griffe.Function, default: Any) -> Any:
    """A default; of a constant, which is in capitals, what it is set to."""
    path = getattr(default, "canonical_path", "")
    is_constant = path.startswith("gradring.") and path.rpartition(".")[2].isupper()
    return function.modules_collection[path].value if is_constant else default
