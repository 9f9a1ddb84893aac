"""Checks of gradients for NaN and infinity, and what follows from a finding.

The ops look, before the reduction: afterwards all ranks have the same NaN, and none can tell
whose it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradring.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """For one Start op."""

    #: Nothing if empty, "warn" or "raise".
    action: str = ""
    #: What the tensors of the op are the gradients of, in order.
    variables: Sequence[str] = ()


NO_CHECK = Check()


def check(check_gradients: object) -> None:
    """Raises `gradring.errors.ConfigError` unless it is "warn", "raise" or None."""
    if check_gradients not in (None, "warn", "raise"):
        raise ConfigError(
            f"check_gradients={check_gradients!r} is unknown; choose 'warn', 'raise' or None"
        )
