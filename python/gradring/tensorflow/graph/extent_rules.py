"""Rules by which an operation of a graph grows with the batch size, as its inputs do.

A program that knows of no replicas adds up its samples' losses or takes their mean. Over all ranks,
sums must be added up and means averaged. Both are scalars; only the graph shows which of them a
value is. Each tensor gets a degree, derived like a unit of measurement. Values whose size does not
depend on the number of samples have degree 0. Sums over the samples, and the number of samples,
have degree 1. A product adds degrees and a quotient subtracts them, so a sum divided by a number of
samples is a mean.

Operations that are not listed have results of unknown degree. The exception is an operation whose
inputs all have degree 0 and whose output has rows for the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

#: Operations that call one function, or one of several.
CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf")
#: Largest constant that counts as a guard against division by 0.
_TINY = 1e-3


@dataclass(frozen=True)
class Extent:
    """Dependence of a tensor on the samples of a batch.

    Attributes:
        has_rows: True if the first dimension is that of the samples.
        degree: Power of the number of samples with which the values grow; None if unknown.
        is_shape: True for the shape of a tensor that has rows.
        is_mixed: True if a sum over samples was added to a term of another degree.
        of_data: True for a sum of the samples' values, such as that of a mask; False for a number
            of samples that comes from a shape.
        is_weighted: True for a quotient by a sum with `of_data`.
        counts: Numbers of samples and of elements that a sum adds up, where the graph has a static
            batch size. Comparisons of extents ignore this field.
        is_by_number: True for a sum that was divided by a constant equal to its number of samples,
            and so counts as a mean. Comparisons of extents ignore this field.
        is_mean: True for a value of degree 0 that depends on several samples. Comparisons of
            extents ignore this field.
        is_curved: True for a function of means that is not linear, such as a root or a product. The
            mean of such values over the ranks is not the value for all samples. Comparisons of
            extents ignore this field.
        has_columns: True if a later dimension than the first is that of the samples, as in a
            transposed batch. Comparisons of extents ignore this field.
        is_paired: True for a value of pairs of samples, such as a matrix of their similarities.
            Comparisons of extents ignore this field.
    """

    has_rows: bool = False
    degree: float | None = 0
    is_shape: bool = False
    is_mixed: bool = False
    of_data: bool = False
    is_weighted: bool = False
    counts: tuple[int, int] | None = field(default=None, compare=False)
    is_by_number: bool = field(default=False, compare=False)
    is_mean: bool = field(default=False, compare=False)
    is_curved: bool = field(default=False, compare=False)
    has_columns: bool = field(default=False, compare=False)
    is_paired: bool = field(default=False, compare=False)

    @property
    def is_sum(self) -> bool:
        """True for a sum over the samples, or for values of which each belongs to one sample."""
        return self.degree == (0 if self.has_rows else 1)

    @property
    def depends(self) -> bool:
        """True if the tensor depends on the samples, or if its dependence is unknown."""
        return self != _INDEPENDENT


#: Linear operations: a mean becomes a mean.
_LINEAR = frozenset(
    (
        *("Add", "AddV2", "AddN", "BiasAdd", "BroadcastTo", "Cast", "CheckNumerics", "ConcatV2"),
        *("EnsureShape", "ExpandDims", "Fill", "GatherV2", "Identity", "Mean", "Neg", "Pack"),
        *("PreventGradient", "Reshape", "Select", "SelectV2", "Snapshot", "Squeeze"),
        *("StopGradient", "StridedSlice", "Sub", "Sum", "Tile", "Transpose", "Unpack"),
    )
)
#: Bilinear operations: a mean and a value that depends on no sample give a mean.
_BILINEAR = frozenset(("Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum"))
#: Operations whose result has the dimensions of the operands, after broadcasting.
_KEEPS_DIMENSIONS = frozenset(
    (
        *("Add", "AddV2", "Sub", "Mul", "RealDiv", "DivNoNan", "SquaredDifference", "Maximum"),
        *("Minimum", "Equal", "NotEqual", "Less", "Greater", "Cast", "Identity", "StopGradient"),
    )
)
_EXTREMES = ("Max", "Min")
QUOTIENTS = ("RealDiv", "Div", "DivNoNan")
PRODUCTS = ("Mul", "MulNoNan", *QUOTIENTS)
#: Operations along a dimension, each with the position of the input that names it.
_ALONG = dict.fromkeys(("Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2"), 1) | {"Roll": 2}
#: Operations that normalise or sort the only dimension of a vector.
_OF_VECTORS = ("LogSoftmax", "Softmax", "TopKV2")
#: Beginnings of the names of operations whose results have other rows than the samples.
_REGROUPS = (
    *("Dynamic", "EagerPyFunc", "PyFunc", "Segment", "SparseSegment", "Unique", "UnsortedSegment"),
    "Where",
)
#: Operations by which a factor of an input is one of the result.
SCALED = _LINEAR.union(PRODUCTS, ("Maximum", "Minimum"))

_INDEPENDENT = Extent()
MEAN = Extent(is_mean=True)
UNKNOWN = Extent(degree=None)
_MIXED = Extent(degree=None, is_mixed=True)
ROWS = Extent(has_rows=True)

Rule = Callable[[tf.Operation, Sequence[Extent]], Extent]


def derived(op: tf.Operation, output: tf.Tensor, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of an operation's output, by those of its inputs."""
    found = _by_rule(op, output, inputs)
    if _is_paired(op, inputs):
        return replace(found, is_paired=True)
    has_columns = _has_columns(op, inputs)
    if has_columns or found.has_columns:
        return replace(found, has_columns=has_columns)
    if found.degree == 1 and not found.has_rows and any(each.of_data for each in inputs):
        found = replace(found, of_data=True)
    if found.degree == 1 and not found.has_rows and found.counts is None:
        known = {each.counts for each in inputs if each.counts is not None}
        found = replace(found, counts=known.pop() if len(known) == 1 else None)
    if any(each.is_by_number for each in inputs):
        found = replace(found, is_by_number=True)
    if any(each.is_weighted for each in inputs):
        found = replace(found, is_weighted=True)
    if found != _INDEPENDENT or not (output.dtype.is_floating or output.dtype.is_complex):
        return found
    if op.type in _EXTREMES and inputs[0].has_rows:
        return replace(found, is_mean=True, is_curved=True)
    are_means = [each.is_mean for each in inputs]
    if not any(are_means) and not any(each.depends and not each.is_shape for each in inputs):
        return found
    is_curved = any(each.is_curved for each in inputs) or _is_curved(op, are_means)
    return replace(found, is_mean=True, is_curved=is_curved)


def _is_paired(op: tf.Operation, inputs: Sequence[Extent]) -> bool:
    """Returns whether an operation combines each sample with each other one, or gets such pairs."""
    if any(each.is_paired for each in inputs) or _is_along_samples(op, inputs):
        return True
    if len(inputs) != 2 or not inputs[0].has_rows:
        return len(inputs) == 2 and inputs[1].has_rows and inputs[0].has_columns
    if op.type == "Einsum":
        terms, _, result = op.get_attr("equation").decode().replace(" ", "").partition("->")
        letters = {term[:1] for term in terms.split(",")}
        return inputs[1].has_rows and len(letters) == 2 and letters <= set(result)
    if op.type == "MatMul" and not op.get_attr("transpose_a"):
        turned = op.get_attr("transpose_b")
        return inputs[1].has_rows if turned else inputs[1].has_columns
    if op.type not in _KEEPS_DIMENSIONS:
        return False
    # Broadcasting puts the samples of the tensor with fewer dimensions into a later dimension.
    ranks = {each.shape.rank for each in op.inputs}
    return inputs[1].has_columns or (inputs[1].has_rows and len(ranks - {None}) == 2)


def _is_along_samples(op: tf.Operation, inputs: Sequence[Extent]) -> bool:
    """Returns whether an operation moves, sorts or accumulates values along the samples."""
    if not inputs or not inputs[0].has_rows:
        return False
    rank = op.inputs[0].shape.rank
    if op.type in _OF_VECTORS:
        return bool(rank == 1)
    if op.type == "RandomShuffle":
        return True
    if op.type == "StridedSlice":
        return _stride_of_rows(op) == -1
    axes = _static(op.inputs[_ALONG[op.type]]) if op.type in _ALONG and rank else None
    return axes is not None and any(int(axis) % rank == 0 for axis in np.ravel(axes))


def _has_columns(op: tf.Operation, inputs: Sequence[Extent]) -> bool:
    """Returns whether the dimension of the samples moves to a later place, or stays there."""
    if op.type in _KEEPS_DIMENSIONS:
        return any(each.has_columns for each in inputs)
    if op.type == "Pack" and op.outputs[0].dtype.is_integer:
        # A shape whose later dimensions are for the samples.
        first, *others = inputs
        return not first.depends and any(each.degree == 1 for each in others)
    if not inputs or not inputs[0].has_rows:
        return False
    if op.type == "StridedSlice":
        return bool(op.get_attr("new_axis_mask") & 1)
    if op.type == "Reshape":
        before, after = (each.shape for each in (op.inputs[0], op.outputs[0]))
        return inputs[1].has_columns or bool(
            (after.rank or 0) > 1 and before.rank and after[0] == 1 != before[0]
        )
    if op.type not in ("ExpandDims", "Transpose"):
        return False
    places = _static(op.inputs[1])
    turned = [0] if op.type == "ExpandDims" else [1, 0]
    return places is not None and list(np.ravel(places)) == turned


def _is_curved(op: tf.Operation, are_means: Sequence[bool]) -> bool:
    """Returns whether an operation turns means into a value that is not a mean."""
    if not any(are_means) or op.type in _LINEAR or op.type in CALLS:
        return False
    if op.type in _BILINEAR:
        return sum(are_means) > 1
    return op.type not in QUOTIENTS or are_means[-1]


def _by_rule(op: tf.Operation, output: tf.Tensor, inputs: Sequence[Extent]) -> Extent:
    if not any(each.depends for each in inputs):
        return _INDEPENDENT
    for each in inputs:
        if each.is_mixed:
            return _MIXED
    rule = _RULES.get(op.type)
    if rule is not None:
        return rule(op, inputs)
    if op.type == "Slice" and inputs[0].has_rows and _is_of_concat(op):
        return inputs[0]
    # An unlisted op counts as a function of each single sample if its output keeps the rows.
    if any(each.degree != 0 for each in inputs):
        return UNKNOWN
    if op.type.startswith(_REGROUPS):
        return replace(UNKNOWN, of_data=True)
    sizes = {
        tensor.shape[0] if tensor.shape.rank else None
        for tensor, extent in zip(op.inputs, inputs, strict=True)
        if extent.has_rows
    }
    if any(each.is_shape for each in inputs) or output.shape.rank is None:
        return ROWS
    return ROWS if output.shape.rank and output.shape[0] in sizes else UNKNOWN


def _same(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    return inputs[0]


def _product(sign: int) -> Rule:
    def rule(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
        first, second = inputs
        if first.degree is None or second.degree is None:
            return UNKNOWN
        has_rows = first.has_rows or second.has_rows
        is_uneven = {first.degree, second.degree} == {0, 1}
        if is_uneven and not has_rows and (first.is_mean or second.is_mean):
            return UNKNOWN
        for value, factor in ((first, 1), (second, 0)):
            if value.counts is not None and not inputs[factor].depends and (factor or sign > 0):
                return _divided(value, op.inputs[factor], sign)
        found = Extent(has_rows, first.degree + sign * second.degree)
        return replace(found, is_weighted=True) if sign < 0 and second.of_data else found

    return rule


def _divided(total: Extent, number: tf.Tensor, sign: int) -> Extent:
    """Returns the extent of a sum over samples that a number divides, or multiplies if sign is 1.

    With a static batch size, `tf.shape(x)[0]` and `x.shape[0]` are constants of the graph. The
    division by this rank's number of samples makes a mean, and any other one leaves a sum. A
    constant that was cast is that of a shape; any other may be equal by chance.
    """
    assert total.counts is not None
    value = _static(number)
    if value is None or np.size(value) != 1 or not value:
        return replace(total, counts=None)
    divisor, (samples, elements) = float(value) ** -sign, total.counts
    is_cast = sign < 0 and number.op.type == "Cast"
    if is_cast and divisor in (samples, elements):
        return Extent(is_mean=True, is_weighted=total.is_weighted)
    if samples > 1 and bool(np.isclose(divisor, samples, rtol=1e-6)):
        return Extent(is_mean=True, is_by_number=True, is_weighted=total.is_weighted)
    return total


def _sum(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the common degree of all terms; tiny constants, guards against 0, do not count."""
    terms = [
        extent
        for extent, tensor in zip(inputs, op.inputs, strict=True)
        if extent.depends or not _is_tiny(tensor)
    ]
    degrees = {each.degree for each in terms}
    if None in degrees:
        return UNKNOWN
    has_rows = any(each.has_rows for each in terms)
    if len(degrees) == 1:
        return Extent(has_rows, degrees.pop())
    return UNKNOWN if has_rows else _MIXED


def _is_tiny(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and bool((abs(value) <= _TINY).all())


def _truth(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of a comparison: rows if an input has rows, else independent."""
    return ROWS if any(each.has_rows for each in inputs) else _INDEPENDENT


def _choice(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the common degree of both branches; tiny constants, such as 0, fit any degree."""
    condition, *branches = inputs
    terms = [
        extent
        for extent, tensor in zip(branches, op.inputs[1:], strict=True)
        if extent.depends or not _is_tiny(tensor)
    ]
    degrees = {each.degree for each in terms}
    if len(degrees) != 1 or None in degrees or condition.degree != 0:
        return UNKNOWN
    return Extent(condition.has_rows or any(each.has_rows for each in terms), degrees.pop())


def _bound(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of a maximum or minimum with a constant, such as a bound of a divisor."""
    dependent = [each for each in inputs if each.depends]
    if len(dependent) == 1 or all(each.degree == 0 for each in inputs):
        return Extent(any(each.has_rows for each in inputs), dependent[0].degree)
    return UNKNOWN


def _reduction(growth: int | None) -> Rule:
    """Makes the rule of a reduction.

    Args:
        growth: Degree that a reduction over the samples adds; None if unknown.
    """

    def rule(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
        value, _ = inputs
        if value.is_shape:  # the product of a shape is the number of elements
            return Extent(degree=1) if op.type == "Prod" else UNKNOWN
        axes = tf.get_static_value(op.inputs[1])
        if not value.has_rows:
            return value
        rank = op.inputs[0].shape.rank
        if axes is None or value.degree is None:
            return UNKNOWN
        numbers = [int(axis) for axis in axes.ravel()]
        if rank is None and any(axis < 0 for axis in numbers):
            return UNKNOWN
        if 0 not in [axis % rank if axis < 0 else axis for axis in numbers]:
            return value
        if growth is None:
            return UNKNOWN
        found = Extent(degree=value.degree + growth, of_data=growth == 1)
        shape = op.inputs[0].shape.as_list() if rank is not None else [None]
        if growth == 1 and value.degree == 0 and shape[0] is not None:
            reduced = [size for axis in numbers if (size := shape[axis]) is not None]
            elements = math.prod(reduced) if len(reduced) == len(numbers) else 0
            return replace(found, counts=(shape[0], elements))
        return found

    return rule


def _shape(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    (value,) = inputs
    return Extent(is_shape=True, of_data=value.of_data) if _has_samples(value) else _INDEPENDENT


def _size(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    (value,) = inputs
    return Extent(degree=1, of_data=value.of_data) if _has_samples(value) else _INDEPENDENT


def _has_samples(value: Extent) -> bool:
    """Returns whether the first dimension is that of the samples, or of those that data chose."""
    return value.has_rows or (value.of_data and value.degree is None)


def _slice(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of a part of a shape; parts of a batch are unknown: other samples."""
    value = inputs[0]
    begin = tf.get_static_value(op.inputs[1])
    if begin is None:
        return UNKNOWN
    first = int(begin.ravel()[0]) if begin.size else 0
    if value.is_shape:
        is_one = op.outputs[0].shape.rank == 0
        if op.get_attr("begin_mask") & 1:
            first = 0
        length = op.inputs[0].shape.num_elements()
        if first < 0 and length is not None:
            first += length
        if first == 0:
            return Extent(degree=1, of_data=value.of_data) if is_one else Extent(is_shape=True)
        return _INDEPENDENT if first > 0 else UNKNOWN
    ends = op.get_attr("end_mask") & 1 or tf.get_static_value(op.inputs[2]) is None
    takes_all = (op.get_attr("begin_mask") & 1 or first == 0) and ends
    is_new = op.get_attr("new_axis_mask") & 1
    if not value.has_rows or _begins_with_ellipsis(op, begin.size):
        return value
    return value if takes_all and not is_new and _stride_of_rows(op) in (1, -1) else UNKNOWN


def _stride_of_rows(op: tf.Operation) -> int | None:
    """Returns the stride of a slice in the dimension of the samples; 1 where it takes them all."""
    strides = _static(op.inputs[3])
    if strides is None or not np.size(strides):
        return None
    is_whole = (op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")) & 1
    return 1 if is_whole else int(np.ravel(strides)[0])


def _is_of_concat(op: tf.Operation) -> bool:
    """Returns whether a slice is the gradient of one of several tensors joined side by side."""
    begin, rank = op.inputs[1].op, op.inputs[0].shape.rank
    axis = _static(begin.inputs[0]) if begin.type == "ConcatOffset" else None
    return axis is not None and rank is not None and int(axis) % rank != 0


def _begins_with_ellipsis(op: tf.Operation, count: int) -> bool:
    """Returns whether the first of so many indices of a slice takes all of the first dimension."""
    rank = op.inputs[0].shape.rank
    if rank is None or not op.get_attr("ellipsis_mask") & 1:
        return False
    others = count - 1 - bin(op.get_attr("new_axis_mask")).count("1")
    return bool(rank > others)


def _gather(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    value, indices, *_ = inputs
    places = _static(op.inputs[1])
    if value.is_shape and places is not None:
        if 0 not in places:
            return _INDEPENDENT
        return Extent(degree=1) if places.size == 1 else Extent(is_shape=True)
    if not value.depends and indices.has_rows and indices.degree == 0:
        return ROWS
    return UNKNOWN


def _joined(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of packed sizes, which make a shape, or of tensors side by side."""
    values = inputs if op.type == "Pack" else inputs[:-1]
    degrees = {each.degree for each in values}
    if op.outputs[0].dtype.is_floating and not any(each.has_rows for each in values):
        return Extent(degree=degrees.pop()) if len(degrees) == 1 else UNKNOWN
    if values[0].is_shape or (values[0].degree == 1 and not values[0].has_rows):
        return Extent(is_shape=True)
    if any(each.degree != 0 or each.is_shape for each in values):
        return UNKNOWN
    if op.type == "Pack" and op.get_attr("axis") == 0:
        return UNKNOWN
    return ROWS


def _repeated(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of a value that is repeated for each sample, or for its elements."""
    value, shape = inputs
    if value.has_rows:
        return value
    return Extent(True, value.degree) if shape.is_shape else UNKNOWN


def _transpose(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    order = tf.get_static_value(op.inputs[1])
    stays = order is not None and order.size and int(order[0]) == 0
    return inputs[0] if stays or not inputs[0].has_rows else UNKNOWN


def _reshaped(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    value, output = inputs[0], op.outputs[0]
    is_number = value.degree == 1 and not value.has_rows and output.dtype.is_integer
    if is_number and output.shape.rank == 1:
        return Extent(is_shape=True, of_data=value.of_data)
    return UNKNOWN if _has_columns(op, inputs) else value


def _ctc(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    """Returns the extent of a CTC loss, which has a value for each sequence."""
    *_, lengths = inputs
    return ROWS if lengths.degree == 0 else UNKNOWN


def _einsum(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    equation = op.get_attr("equation").decode().replace(" ", "")
    terms, _, result = equation.partition("->")
    names = {
        term[:1] for term, extent in zip(terms.split(","), inputs, strict=True) if extent.has_rows
    }
    degrees = [each.degree for each in inputs]
    if None in degrees or len(names) != 1 or "." in equation:
        return UNKNOWN
    degree = sum(each for each in degrees if each is not None)
    (name,) = names
    if name not in result:
        return Extent(degree=degree + 1)
    return Extent(True, degree) if result[0] == name else UNKNOWN


def _static(tensor: tf.Tensor) -> Any:
    """Returns constant integers of a graph, also those that a gradient computes; None otherwise."""
    known = tf.get_static_value(tensor)
    if known is not None:
        return known
    if tensor.op.type == "Cast":
        return _static(tensor.op.inputs[0])
    if tensor.op.type == "StridedSlice" and tensor.shape.rank == 0:
        whole, begin = (_static(each) for each in tensor.op.inputs[:2])
        return None if whole is None or np.size(begin) != 1 else whole[int(np.ravel(begin)[0])]
    rule = {"FloorMod": np.mod, "AddV2": np.add}.get(tensor.op.type)
    if rule is None:
        return None
    parts = [_static(each) for each in tensor.op.inputs]
    return None if any(each is None for each in parts) else rule(*parts)


def _matmul(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    first, second = inputs
    if first.degree is None or second.degree is None:
        return UNKNOWN
    degree = first.degree + second.degree
    transposed = "transpose_a" if op.type == "MatMul" else "adj_x"
    is_flat = op.inputs[0].shape.rank == 2
    if first.has_rows and second.has_rows:
        if not is_flat:
            return Extent(True, degree)
        return Extent(degree=degree + 1) if op.get_attr(transposed) else UNKNOWN
    if first.has_rows and not (is_flat and op.get_attr(transposed)):
        return Extent(True, degree)
    return UNKNOWN


def _l2(op: tf.Operation, inputs: Sequence[Extent]) -> Extent:
    (value,) = inputs
    return Extent(degree=1) if value.has_rows and value.degree == 0 else UNKNOWN


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("Neg", "Identity", "Cast", "StopGradient", "Squeeze"),
            *("CheckNumerics", "PreventGradient", "EnsureShape", "Snapshot", "ZerosLike"),
        ),
        _same,
    ),
    **dict.fromkeys(("Mul", "MulNoNan"), _product(1)),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), _product(-1)),
    **dict.fromkeys(("Add", "AddV2", "Sub", "AddN", "BiasAdd"), _sum),
    **dict.fromkeys(("Maximum", "Minimum"), _bound),
    **dict.fromkeys(
        (
            *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"),
            *("LogicalAnd", "LogicalOr", "LogicalNot"),
        ),
        _truth,
    ),
    **dict.fromkeys(("Select", "SelectV2"), _choice),
    "Sum": _reduction(1),
    **dict.fromkeys(("Mean", *_EXTREMES), _reduction(0)),
    "Prod": _reduction(None),
    "Shape": _shape,
    "Size": _size,
    "StridedSlice": _slice,
    "GatherV2": _gather,
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2"), _matmul),
    **dict.fromkeys(("Pack", "ConcatV2"), _joined),
    **dict.fromkeys(("Tile", "BroadcastTo"), _repeated),
    **dict.fromkeys(("ExpandDims", "Reshape"), _reshaped),
    **dict.fromkeys(("CTCLoss", "CTCLossV2"), _ctc),
    "Transpose": _transpose,
    "Einsum": _einsum,
    "L2Loss": _l2,
}
