"""Growth of a value with the batch size, by its graph: sums over samples grow, means do not.

The extent of each tensor is derived from its inputs, by `extent_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.expressions import Key, ancestors, captured, is_in_graph, key_of
from gradring.tensorflow.graph.extent_rules import (
    CALLS,
    MEAN,
    PRODUCTS,
    ROWS,
    SCALED,
    UNKNOWN,
    Extent,
    derived,
)
from gradring.tensorflow.graph.replica_step import current


def extent_of(
    tensor: Any,
    batch: Iterable[Any],
    means: Iterable[Any] = (),
    filled: Iterable[tuple[Any, Any]] = (),
) -> Extent:
    """Returns how a tensor depends on a batch.

    Args:
        tensor: Tensor of a graph; nothing is known of an eager tensor.
        batch: Tensors that have a row for each sample.
        means: Tensors that count as means without a look at their graph.
        filled: Tensors of the batch that were made of others, in this order; values of pairs stay
            such values, and quotients by a sum of the samples' values.
    """
    if not is_in_graph(tensor):
        return UNKNOWN
    known = {key_of(each): ROWS for each in batch if tf.is_symbolic_tensor(each)}
    known |= {key_of(each): MEAN for each in means if tf.is_symbolic_tensor(each)}
    try:
        for result, source in filled:
            if is_in_graph(result) and is_in_graph(source):
                (found,) = _in_graph([source], known)
                known[key_of(result)] = replace(
                    ROWS, is_paired=found.is_paired, is_weighted=found.is_weighted
                )
        return _in_graph([tensor], known)[0]
    except (AttributeError, LookupError, TypeError, ValueError):
        return UNKNOWN


def extent_in_step(tensor: Any) -> Extent:
    """Returns how a tensor of the current step depends on its batch."""
    step = current()
    return extent_of(tensor, step.batch, step.means, step.filled)


def is_of_no_batch(tensor: Any, batch: Iterable[Any]) -> bool:
    """Returns whether a graph computes a tensor without any sample, such as positions in a text.

    Args:
        tensor: Tensor of a graph; the result is False for an eager tensor.
        batch: Tensors that have a row for each sample.
    """
    if extent_of(tensor, batch).depends:
        return False
    try:
        return not any(_is_stateful(op) for op in _all_ancestors([tensor], set()))
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _is_stateful(op: tf.Operation) -> bool:
    """Returns whether an operation can return something new each time, such as the next batch.

    A variable is the same for all samples of a step, so reads of variables do not count.
    """
    return bool(op.op_def.is_stateful) and op.type != "ReadVariableOp"


def _all_ancestors(tensors: Sequence[tf.Tensor], seen: set[Key]) -> Iterator[tf.Operation]:
    """Yields the ancestors of tensors of one graph, also those in graphs around it, once each."""
    outer_of = captured(tensors[0].graph) if tensors else {}
    for op in ancestors(tensors, seen):
        seen.update(map(key_of, op.outputs))
        yield op
        outer = outer_of.get(op.outputs[0].name) if op.outputs else None
        if is_in_graph(outer):
            yield from _all_ancestors([outer], seen)


def comes_from(tensor: Any, kind: str, batch: Iterable[Any] = ()) -> bool:
    """Returns whether an operation whose type begins with `kind` is among a tensor's ancestors.

    Operations that only tensors of `batch` need do not count.
    """
    known = {key_of(each) for each in batch if is_in_graph(each)}
    return is_in_graph(tensor) and any(
        op.type.startswith(kind) for op in _all_ancestors([tensor], known)
    )


def is_of_any(tensor: tf.Tensor, sources: Iterable[Any]) -> bool:
    """Returns whether a tensor of a graph is computed from one of other tensors."""
    keys = {key_of(each) for each in sources if is_in_graph(each)}
    ops = _all_ancestors([tensor], set())
    return any(key_of(output) in keys for op in ops for output in op.outputs)


def factors_of(tensor: tf.Tensor, *, last: bool = False) -> list[float]:
    """Returns the constant factors and divisors of a tensor, or those in its last operation.

    Factors inside of other than linear functions are left out, such as those of a model's layers.
    """
    ops = [tensor.op] if last else _linear_ops([tensor])
    taken = [each for op in ops if op.type in PRODUCTS for each in op.inputs]
    values = map(tf.get_static_value, taken)
    return [float(value) for value in values if value is not None and np.size(value) == 1]


def _linear_ops(tensors: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """Yields the linear operations from which tensors come, also in called functions."""
    ahead, seen = [each.op for each in tensors], set[tf.Operation]()
    while ahead:
        op = ahead.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type in CALLS:
            for graph in compat.called_graphs(op):
                yield from _linear_ops(graph.outputs)
        elif op.type not in SCALED:
            continue
        yield op
        ahead += [each.op for each in op.inputs]


def _in_graph(tensors: Sequence[tf.Tensor], known: dict[Key, Extent]) -> list[Extent]:
    """Returns the extents of tensors of one graph; adds those of all that they need to `known`."""
    outer_of = captured(tensors[0].graph) if tensors else {}
    for op in ancestors(tensors, known):
        outer = outer_of.get(op.outputs[0].name) if op.outputs else None
        if is_in_graph(outer):
            extents = _in_graph([outer], known)
        elif op.type == "Placeholder" and outer is None:
            # An argument of a function.
            extents = [ROWS if _may_have_rows(op.outputs[0]) else UNKNOWN]
        else:
            inputs = [known[key_of(each)] for each in op.inputs]
            extents = _called(op, inputs)
            extents = extents or [derived(op, output, inputs) for output in op.outputs]
        for output, extent in zip(op.outputs, extents, strict=True):
            known.setdefault(key_of(output), extent)
    return [known[key_of(each)] for each in tensors]


def _may_have_rows(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _called(op: tf.Operation, inputs: Sequence[Extent]) -> list[Extent]:
    """Returns the extents of the outputs of an operation that calls functions.

    All called functions take the last inputs of the operation. The list is empty if the operation
    calls nothing, or if no input depends on the samples.
    """
    if op.type not in CALLS or not any(each.depends or each.is_mean for each in inputs):
        return []
    ways = []
    for graph in compat.called_graphs(op):
        of_graph = zip(graph.inputs, inputs[len(inputs) - len(graph.inputs) :], strict=True)
        known = {key_of(tensor): extent for tensor, extent in of_graph}
        ways.append(_in_graph(graph.outputs, known))
    if not ways or any(len(way) != len(op.outputs) for way in ways):
        return []
    return [_either(each) for each in zip(*ways, strict=True)]


def _either(ways: Sequence[Extent]) -> Extent:
    """Returns the extent of an output that one of several functions computes."""
    (first, *others) = ways
    if any(each.degree != first.degree or each.is_mixed for each in others):
        return UNKNOWN
    return replace(
        first,
        has_rows=any(each.has_rows for each in ways),
        is_mean=any(each.is_mean for each in ways),
        is_curved=any(each.is_curved for each in ways),
        is_paired=any(each.is_paired for each in ways),
        is_by_number=any(each.is_by_number for each in ways),
    )
