"""Checks of gradients for NaN, infinity and equal ranks, and of the arguments of reductions.

The ops look for NaN before the reduction. After it all ranks have the same NaN, and none can know
which rank had it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gradring.config import parse
from gradring.config.words import did_you_mean
from gradring.errors import ConfigError
from gradring.group.arrays import ReduceOp
from gradring.group.communicator import Communicator

#: Treatment of rows of equal index in gradients of embeddings.
Embeddings: TypeAlias = Literal["rows", "sum"]
EMBEDDINGS: tuple[Embeddings, ...] = get_args(Embeddings)

#: Reactions to gradients with NaN or infinity.
CheckGradients: TypeAlias = Literal["warn", "raise"]

#: Names of the reduce ops of `Communicator.all_reduce`.
REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)
#: Other libraries' names of reduce ops; the core suggests the same.
_OTHER_NAMES = {"avg": "mean", "average": "mean", "prod": "product"}


@dataclass(frozen=True)
class Check:
    """Check of the gradients of one Start op."""

    #: "warn", "raise", or empty for no check.
    action: str = ""
    #: Names of the variables of the op's gradients, in order.
    variables: Sequence[str] = ()
    #: True if each rank has computed the op's gradients from its own samples. A warning tells if
    #: they are equal on all ranks.
    of_own_samples: bool = False


NO_CHECK = Check()


def check(check_gradients: object) -> None:
    """Raises `gradring.errors.ConfigError` unless the argument is "warn", "raise" or None."""
    if check_gradients not in (None, "warn", "raise"):
        raise ConfigError(
            f"check_gradients={check_gradients!r} is unknown; choose 'warn', 'raise' or None"
        )


def check_embeddings(embeddings: object) -> None:
    """Raises `gradring.errors.ConfigError` unless the argument is "rows" or "sum"."""
    if embeddings not in EMBEDDINGS:
        raise ConfigError(
            f"embeddings={parse.shown(embeddings)} is unknown; choose 'rows', which leaves rows of "
            "equal index to the optimizer, or 'sum', which adds them up"
        )


def check_op(op: object) -> None:
    """Raises `gradring.errors.ConfigError` unless the argument is the name of a reduce op."""
    if isinstance(op, str) and op in REDUCE_OPS:
        return
    is_group = isinstance(op, Communicator) or hasattr(op, "communicator")
    meant = did_you_mean(_OTHER_NAMES.get(str(op).lower()))
    hint = "; give the group as communicator=" if is_group else meant
    raise ConfigError(f"op={parse.shown(op)} is none of {', '.join(REDUCE_OPS)}{hint}")


def check_communicator(communicator: object) -> None:
    """Raises `gradring.errors.ConfigError` unless the argument is a communicator or None."""
    if communicator is None or isinstance(communicator, Communicator):
        return
    has_one = isinstance(getattr(communicator, "communicator", None), Communicator)
    hint = "its attribute communicator" if has_one else "what gradring.init() returns"
    raise ConfigError(
        f"communicator={parse.shown(communicator)} is no gradring.Communicator; give {hint}"
    )
