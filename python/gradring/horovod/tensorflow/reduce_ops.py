"""The reductions, by Horovod's names."""

from __future__ import annotations

import enum

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]


class ReduceOp(enum.Enum):
    """A reduction; its value is gradring's name."""

    AVERAGE = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


Average = ReduceOp.AVERAGE
"""The mean over ranks."""
Sum = ReduceOp.SUM
"""The sum over ranks."""
Min = ReduceOp.MIN
"""The least element of all ranks."""
Max = ReduceOp.MAX
"""The greatest element of all ranks."""
Product = ReduceOp.PRODUCT
"""The product over ranks."""
Adasum = ReduceOp.ADASUM
"""Named for programs that import it; a call with it is a `NotImplementedError`."""

#: Reductions that are defined for rows, parts and gradients.
LINEAR = (Average, Sum)


def chosen(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the reduction of a call, from `op` or from the older argument `average`.

    Raises:
        TypeError: `op` is not a reduction.
        ValueError: Both are given.
        NotImplementedError: `op` is Adasum.
    """
    if op is not None and not isinstance(op, ReduceOp):
        raise TypeError(f"op={op!r} is no reduction; pass one such as hvd.Average or hvd.Sum")
    if op is not None and average is not None:
        raise ValueError("op and average are both given; give op, of which average is the old form")
    if average is not None:
        op = Average if average else Sum
    if op is Adasum:
        raise NotImplementedError(
            "Adasum: gradring does not have it; use op=hvd.Average, and a learning rate for the "
            "global batch"
        )
    return Average if op is None else op


def linear(op: ReduceOp, what: str) -> ReduceOp:
    """Returns the reduction if it is Average or Sum.

    Raises:
        NotImplementedError: `op` is another reduction.
    """
    if op not in LINEAR:
        raise NotImplementedError(
            f"{what}: only hvd.Average and hvd.Sum, not {op.name.title()}; use one of them, or "
            "hvd.allreduce of a dense tensor, which takes every op"
        )
    return op
