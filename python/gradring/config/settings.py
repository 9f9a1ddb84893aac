"""The table of settings, which stands in ``rust/net/src/config.rs``.

``make settings`` writes the table of ``docs/command-line.md`` and types in ``_native.pyi`` from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import TypeVar, cast

from gradring import _native

_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        name: What the code calls it; the argument of ``gradring.init()`` if there is one.
        variable: Its name.
        kind: What its value is, in words; says how it is read.
        choices: What can be chosen, or the least and the greatest number; empty for anything.
        default: What counts when it is unset or empty; empty for nothing.
        argument: Whether it is an argument of ``gradring.init()``, which beats the variable.
        agreed: Whether all ranks need the same value.
        reader: Who reads it: ``Clusters``, ``Group`` and ``Program``
            (`gradring.config.values.Settings`, for the core and for Python),
            or ``User``, the code that uses it.
        meaning: What it does, in a few words.
    """

    name: str
    variable: str
    kind: str
    choices: list[str]
    default: str
    argument: bool
    agreed: bool
    reader: str
    meaning: str


#: Of all variables of the table.
PREFIX = "GRADRING_"
SETTINGS = tuple(Setting(**row) for row in _native.settings())
#: Those that `gradring.config.values.Settings` reads, by name.
READ: dict[str, Setting] = {}
for _setting in SETTINGS:
    if _setting.reader in ("Group", "Program"):
        READ.setdefault(_setting.name, _setting)
#: Those that are handed to the core.
GROUP = tuple(setting for setting in SETTINGS if setting.reader == "Group")


def variables(name: str) -> list[str]:
    """The variables that say a setting: several for a token and for TLS."""
    return [setting.variable for setting in SETTINGS if setting.name == name]


def takes_settings(function: _Function) -> _Function:
    """Shows the settings that ``function`` takes as ``**settings`` in its signature, by name."""
    signature = inspect.signature(function)
    *named, _ = signature.parameters.values()
    more = [
        inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for setting in unnamed(function)
    ]
    whole = signature.replace(parameters=[*named, *more])
    function.__signature__ = whole  # type: ignore[attr-defined]
    return function


def unnamed(function: Callable[..., object]) -> list[Setting]:
    """The settings of a group for which ``function`` has no parameter of its own."""
    code = cast(FunctionType, function).__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [setting for setting in GROUP if setting.name not in named]
