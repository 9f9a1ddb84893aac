"""Checks of gradients for NaN and infinity, and of the arguments of reductions.

The ops look for NaN before the reduction: afterwards all ranks have the same NaN, and none can tell
whose it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gradring.config import parse
from gradring.errors import ConfigError
from gradring.group.arrays import ReduceOp
from gradring.group.communicator import Communicator

#: What becomes of rows of equal index in gradients of embeddings.
Embeddings: TypeAlias = Literal["rows", "sum"]
EMBEDDINGS: tuple[Embeddings, ...] = get_args(Embeddings)

#: Names of what `Communicator.all_reduce` can do.
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


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


def check_embeddings(embeddings: object) -> None:
    """Raises `gradring.errors.ConfigError` unless it is "rows" or "sum"."""
    if embeddings not in EMBEDDINGS:
        raise ConfigError(
            f"embeddings={parse.shown(embeddings)} is unknown; choose 'rows', which leaves rows of "
            "equal index to the optimizer, or 'sum', which adds them up"
        )


def check_op(op: object) -> None:
    """Raises `gradring.errors.ConfigError` unless it is the name of a reduce op."""
    if isinstance(op, str) and op in REDUCE_OPS:
        return
    is_group = isinstance(op, Communicator) or hasattr(op, "communicator")
    hint = "; give the group as communicator=" if is_group else ""
    raise ConfigError(f"op={parse.shown(op)} is none of {', '.join(REDUCE_OPS)}{hint}")


def check_communicator(communicator: object) -> None:
    """Raises `gradring.errors.ConfigError` unless it is a communicator or None."""
    if communicator is None or isinstance(communicator, Communicator):
        return
    has_one = isinstance(getattr(communicator, "communicator", None), Communicator)
    hint = "its attribute communicator" if has_one else "what gradring.init() returns"
    raise ConfigError(
        f"communicator={parse.shown(communicator)} is no gradring.Communicator; give {hint}"
    )
