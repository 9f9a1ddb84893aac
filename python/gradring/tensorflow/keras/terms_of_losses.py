"""Losses whose terms need different factors, so that the mean over ranks is that of one process.

* A mean over samples, and a penalty of weights, need none.
* A sum over samples is multiplied by the number of ranks.
* A quotient of sums over samples is computed from the sums over all ranks. Examples are a mean over
  the tokens that a mask keeps, and the Dice coefficient of a batch. The gradient of ``a / b`` is
  that of ``a`` times ``1 / b``, minus that of ``b`` times ``a / b ** 2``, where a rank has its own
  part of each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import replicas_of
from gradring.tensorflow.graph.expressions import is_in_graph, key_of
from gradring.tensorflow.graph.extent import comes_from, extent_in_step
from gradring.tensorflow.graph.extent_rules import QUOTIENTS
from gradring.tensorflow.graph.replica_step import current

_SAME = ("Identity", "Cast", "CheckNumerics")
#: Operations that keep a scalar; their other inputs are dimensions.
_OF_ONE = ("Mean", "Reshape", "Squeeze", "Sum")
_ADDED = ("Add", "AddV2", "AddN")


class Slope(NamedTuple):
    """The slope of a loss with respect to one of the values from which it is computed.

    Attributes:
        value: A scalar of the step's graph.
        factor: The slope; a number, or a float64 scalar.
        is_whole: True if the mean over ranks of the gradients is that of one process for certain.
    """

    value: tf.Tensor
    factor: Any
    is_whole: bool


class _Linear(NamedTuple):
    """A scalar as a sum of others, with their coefficients."""

    sums: list[tuple[tf.Tensor, float]]
    #: Terms that depend on no sample.
    rest: list[tuple[tf.Tensor, float]]


class _Quotient(NamedTuple):
    """A quotient of sums over samples; all tensors are float64 scalars.

    Attributes:
        above: Terms of the dividend.
        below: Terms of the divisor.
        dividend: The dividend over all ranks.
        divisor: The divisor over all ranks.
        is_free: 1, or 0 if the divisor is at its lower bound.
    """

    above: _Linear
    below: _Linear
    dividend: tf.Tensor
    divisor: tf.Tensor
    is_free: tf.Tensor


class _Term(NamedTuple):
    """A term of a value: a scalar, and its constant coefficient."""

    value: tf.Tensor
    coefficient: float
    is_sum: bool
    quotient: _Quotient | None


def part_of(value: Any, ratio: tf.Tensor | None) -> tuple[tf.Tensor, list[tf.Tensor]] | None:
    """Returns this rank's part of a value whose terms need different factors, or None.

    All ranks call it in the same place of a step, as it adds up sums of all ranks. The mean of the
    parts over all ranks is the value of one process, and the same holds for gradients.

    Args:
        value: A loss, log or metric's value.
        ratio: This rank's share of the samples, relative to an equal share, if the part will be
            multiplied by it; None for 1.

    Returns:
        The part, and those terms of it of which it is uncertain if they are means.
    """
    parts, uncertain = [], []
    for term in _terms(value):
        if term.quotient is not None:
            parts.append(term.coefficient * _part_of_quotient(term.quotient, ratio))
            continue
        part = term.coefficient * tf.cast(term.value, tf.float64)
        if term.is_sum:
            part = _over(part * _count(), ratio)
        else:
            uncertain.append(term.value)
        parts.append(part)
    return (tf.cast(tf.add_n(parts), value.dtype), uncertain) if parts else None


def slopes_of(value: Any, ratio: tf.Tensor | None) -> list[Slope]:
    """Returns the slopes of a loss whose terms need different factors.

    All ranks call it in the same place of a step, as it adds up sums of all ranks.

    Args:
        value: The loss.
        ratio: As for `part_of`.

    Returns:
        An empty list if the whole value is a mean, a sum, or something else.
    """
    slopes = []
    for term in _terms(value):
        if term.quotient is not None:
            quotient = term.quotient
            unit = tf.math.divide_no_nan(term.coefficient * _count(), quotient.divisor)
            whole = tf.math.divide_no_nan(quotient.dividend, quotient.divisor)
            of_divisor = -unit * whole * quotient.is_free
            for slope, sums in ((unit, quotient.above.sums), (of_divisor, quotient.below.sums)):
                slopes += [Slope(each, _over(slope * factor, ratio), True) for each, factor in sums]
        elif term.is_sum:
            factor = tf.constant(term.coefficient * _count(), tf.float64)
            slopes.append(Slope(term.value, _over(factor, ratio), True))
        else:
            slopes.append(Slope(term.value, term.coefficient, False))
    return slopes


def slope_of_sum(ratio: tf.Tensor | None) -> tf.Tensor:
    """Returns the slope of a sum over samples beside other losses; `ratio` as for `part_of`."""
    return _over(tf.constant(_count(), tf.float64), ratio)


def _over(value: tf.Tensor, ratio: tf.Tensor | None) -> tf.Tensor:
    return value if ratio is None else tf.math.divide_no_nan(value, ratio)


def _count() -> float:
    return float(replicas_of(tf.distribute.get_strategy()))


def _part_of_quotient(quotient: _Quotient, ratio: tf.Tensor | None) -> tf.Tensor:
    above, below = (_total(each.sums) for each in (quotient.above, quotient.below))
    moved = below - tf.stop_gradient(below)  # 0, with the divisor's gradient
    slope = tf.math.divide_no_nan(quotient.dividend, quotient.divisor) * quotient.is_free
    of_sums = tf.math.divide_no_nan(_count() * (above - moved * slope), quotient.divisor)
    rest = tf.math.divide_no_nan(_total(quotient.above.rest), quotient.divisor)
    return _over(of_sums, ratio) + rest


def _total(terms: Sequence[tuple[tf.Tensor, float]]) -> tf.Tensor:
    values = [factor * tf.cast(value, tf.float64) for value, factor in terms]
    return tf.add_n([tf.zeros([], tf.float64), *values])


def _terms(value: Any) -> list[_Term]:
    """Returns the terms of a value if they need different factors, or else an empty list."""
    if not is_in_graph(value) or value.shape.rank != 0 or not value.dtype.is_floating:
        return []
    if current().has_whole_batch or value.graph is not tf.compat.v1.get_default_graph():
        return []
    if _is_in_branch(value.graph):
        return []  # other ranks may not come here
    found = []
    for tensor, coefficient in _linear_terms(value, 1.0):
        quotient = _quotient_of(tensor)
        found.append(_Term(tensor, coefficient, extent_in_step(tensor).is_sum, quotient))
    sums = sum(each.is_sum for each in found)
    return found if 0 < sums < len(found) or any(each.quotient for each in found) else []


def _is_in_branch(graph: Any) -> bool:
    """Returns whether a graph is, or is called in, a branch or loop of the step."""
    while graph is not None and graph is not current().graph:
        if compat.is_control_flow(graph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _linear_terms(value: tf.Tensor, coefficient: float) -> Iterator[tuple[tf.Tensor, float]]:
    """Yields scalars and their constant coefficients, whose sum is `value`."""
    op = value.op
    operands = op.inputs[:1] if op.type in _OF_ONE else op.inputs
    if op.type == "Sum" and op.inputs[0].op.type == "Pack" and op.inputs[0].shape.rank == 1:
        operands = op.inputs[0].op.inputs
    are_scalars = all(each.shape.rank == 0 and each.dtype.is_floating for each in operands)
    means = {key_of(each) for each in current().means if is_in_graph(each)}
    inner: list[tuple[tf.Tensor, float]] = []
    if are_scalars and key_of(value) not in means:
        numbers = [tf.get_static_value(each) for each in operands]
        if op.type in (*_SAME, *_OF_ONE, *_ADDED):
            inner = [(each, coefficient) for each in operands]
        elif op.type == "Neg":
            inner = [(op.inputs[0], -coefficient)]
        elif op.type == "Sub":
            inner = [(op.inputs[0], coefficient), (op.inputs[1], -coefficient)]
        elif op.type == "Mul" and numbers[0] is not None:
            inner = [(op.inputs[1], coefficient * float(numbers[0]))]
        elif op.type == "Mul" and numbers[1] is not None:
            inner = [(op.inputs[0], coefficient * float(numbers[1]))]
        elif op.type in QUOTIENTS and numbers[1]:
            inner = [(op.inputs[0], coefficient / float(numbers[1]))]
    if not inner or (len(inner) == 1 and _divides_by_samples(value, *inner[0], coefficient)):
        yield value, coefficient
        return
    for each, factor in inner:
        yield from _linear_terms(each, factor)


def _divides_by_samples(
    value: tf.Tensor, inner: tf.Tensor, factor: float, coefficient: float
) -> bool:
    """Returns whether a number that divides sums can be that of the rank's samples."""
    if extent_in_step(inner).degree != extent_in_step(value).degree:
        return True
    counts = [extent_in_step(each).counts or () for each, _ in _linear_terms(inner, 1.0)]
    numbers = (coefficient / factor, factor / coefficient) if factor and coefficient else ()
    return any(
        count > 1 and math.isclose(count, number, rel_tol=1e-6)
        for each in counts
        for count in each
        for number in numbers
    )


def _quotient_of(value: tf.Tensor) -> _Quotient | None:
    """Returns a value of a step's graph as a quotient of sums over data, or None."""
    known = current().quotients
    key = key_of(value)
    if key in known or value.op.type not in QUOTIENTS:
        found: _Quotient | None = known.get(key)
        return found
    if any(each.shape.rank != 0 for each in value.op.inputs):
        return None
    divisor, bound = _unguarded(value.op.inputs[1])
    above, below = _linear(value.op.inputs[0]), _linear(divisor)
    if above is None or below is None or not above.sums:
        return None
    if not any(extent_in_step(each).of_data for each, _ in below.sums):
        return None
    own = tf.stack([_total(above.sums), _total(below.sums)])
    reduced = tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tf.stop_gradient(own)
    )
    dividend = tf.stop_gradient(reduced[0] + _total(above.rest))
    total = tf.stop_gradient(reduced[1] + _total(below.rest))
    if bound is None:
        is_free = tf.ones([], tf.float64)
    else:
        is_free = tf.cast(total > bound, tf.float64)
        total = tf.maximum(total, tf.constant(bound, tf.float64))
    known[key] = quotient = _Quotient(above, below, dividend, total, is_free)
    return quotient


def _linear(value: tf.Tensor) -> _Linear | None:
    """Returns a value as sums over samples and constants; None if it is something else."""
    found = _Linear([], [])
    for tensor, coefficient in _linear_terms(value, 1.0):
        extent = extent_in_step(tensor)
        is_plain = not (extent.has_rows or extent.is_weighted or extent.is_paired)
        if _peeled(tensor).op.type in ("Maximum", "Minimum"):
            return None
        if extent.is_sum and is_plain:
            found.sums.append((tensor, coefficient))
        elif not extent.depends and not comes_from(tensor, "ReadVariableOp"):
            found.rest.append((tensor, coefficient))
        else:
            return None
    return found


def _unguarded(value: tf.Tensor) -> tuple[tf.Tensor, float | None]:
    """Returns a divisor and its constant lower bound, such as that of `tf.maximum(total, 1)`."""
    op = _peeled(value).op
    numbers = [tf.get_static_value(each) for each in op.inputs]
    if op.type != "Maximum" or numbers.count(None) != 1:
        return value, None
    place = numbers.index(None)
    return op.inputs[place], float(numbers[1 - place])


def _peeled(value: tf.Tensor) -> tf.Tensor:
    while value.op.type in _SAME:
        value = value.op.inputs[0]
    return value
