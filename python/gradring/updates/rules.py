"""The rules, as values: checked when they are made, compared and shown, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeAlias

from gradring.errors import ConfigError
from gradring.parse import shown


@dataclass(frozen=True)
class AllReduce:
    """Every rank applies the sum of all ranks' gradients: all do what one process would do.

    Attributes:
        compression: None; there is no other yet.
        sync_every: After how many steps the ranks reduce, and the optimizer moves the variables.
            The steps before add up their gradients in memory, so that ``sync_every=k`` does what
            batches of k times the size would do. Default 1.

    Raises:
        gradring.errors.ConfigError: `compression` is not None, or `sync_every` is below 1.
    """

    compression: None = None
    sync_every: int = 1

    def __post_init__(self) -> None:
        if self.compression is not None:
            raise _wrong(self, "compression", "is not offered yet; leave it out")
        _check_count(self, "sync_every")


@dataclass(frozen=True)
class Primary:
    """The chief, which is rank 0, applies the sum of all gradients, and sends all its variables.

    So the variables have the same bits everywhere, whatever a rank's processor or libraries
    compute, and only the chief's optimizer has a state.

    Attributes:
        sync_every: As for `AllReduce`.

    Raises:
        gradring.errors.ConfigError: `sync_every` is below 1.
    """

    sync_every: int = 1

    def __post_init__(self) -> None:
        _check_count(self, "sync_every")


@dataclass(frozen=True)
class Nesterov:
    """An outer step: what all ranks have moved together is taken as a gradient (DiLoCo).

    See A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv 2311.08105.

    Attributes:
        learning_rate: Of the outer step, above 0; default 0.7.
        momentum: Nesterov's, from 0 to below 1; default 0.9.

    Raises:
        gradring.errors.ConfigError: One of them is something else.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_number(self, "learning_rate", lambda rate: rate > 0, "above 0")
        _check_number(self, "momentum", lambda momentum: 0 <= momentum < 1, "from 0 to below 1")


@dataclass(frozen=True)
class LocalSGD:
    """Each rank applies its own gradients; after some steps, the ranks average their variables.

    Attributes:
        every: The steps of a round, at the end of which they do; default 16.
        outer: None (default): the mean replaces the variables. `Nesterov`: it is where an outer
            optimizer steps to, from the variables that the round began with.

    Raises:
        gradring.errors.ConfigError: `every` is below 1, or `outer` is something else.
    """

    every: int = 16
    outer: Nesterov | None = None

    def __post_init__(self) -> None:
        _check_count(self, "every")
        if not isinstance(self.outer, Nesterov | None):
            raise _wrong(self, "outer", "is neither None nor a Nesterov; correct it")


#: What a strategy can be told.
Rule: TypeAlias = AllReduce | Primary | LocalSGD


def _check_count(rule: Rule, name: str) -> None:
    count = getattr(rule, name)
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise _wrong(rule, name, "is not a whole number above 0; correct it")
    # Ranks compare what rules look like, and numpy's numbers look otherwise.
    object.__setattr__(rule, name, int(count))


def _check_number(rule: Nesterov, name: str, is_right: Callable[[float], bool], what: str) -> None:
    value = getattr(rule, name)
    if not (isinstance(value, Real) and math.isfinite(value) and is_right(float(value))):
        raise _wrong(rule, name, f"is not a number {what}; correct it")
    object.__setattr__(rule, name, float(value))


def _wrong(rule: object, name: str, problem: str) -> ConfigError:
    return ConfigError(f"{type(rule).__name__}: {name}={shown(getattr(rule, name))} {problem}")
