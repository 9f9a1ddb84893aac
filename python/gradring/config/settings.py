"""Table of settings, read from ``rust/net/src/config.rs``.

``make settings`` generates the table of ``docs/command-line.md`` and types in ``_native.pyi`` from
it.
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
    """One row of the table: a variable and the setting that it gives.

    Attributes:
        name: Name in code, which is the argument of ``gradring.init()`` if there is one.
        variable: Name of the variable.
        kind: Type of the value in words, which selects the function that reads it.
        choices: Allowed values, or the least and the greatest number; empty without a limit.
        default: Value if the variable is unset or empty; empty for none.
        argument: Whether ``gradring.init()`` has such an argument, which beats the variable.
        agreed: Whether all ranks need the same value.
        reader: Reader of the value: ``Clusters``, ``Group`` (the core), ``Program`` (Python) or
            ``User`` (the code that uses the value). `gradring.config.values.Settings` has those of
            ``Group`` and ``Program``.
        meaning: Effect in a few words.
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


#: Prefix of all variables of the table.
PREFIX = "GRADRING_"
SETTINGS = tuple(Setting(**row) for row in _native.settings())
#: Settings that `gradring.config.values.Settings` reads, by name.
READ: dict[str, Setting] = {}
for _setting in SETTINGS:
    if _setting.reader in ("Group", "Program"):
        READ.setdefault(_setting.name, _setting)
#: Settings that are passed to the core.
GROUP = tuple(setting for setting in SETTINGS if setting.reader == "Group")


def variables(name: str) -> list[str]:
    """Returns the variables of a setting: several for a token and for TLS."""
    return [setting.variable for setting in SETTINGS if setting.name == name]


def takes_settings(function: _Function) -> _Function:
    """Adds the settings that ``function`` takes as ``**settings`` to its signature, by name."""
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
    """Returns the settings of a group for which ``function`` has no parameter of its own."""
    code = cast(FunctionType, function).__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [setting for setting in GROUP if setting.name not in named]
