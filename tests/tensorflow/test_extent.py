"""Growth of values with a batch, as graphs tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from gradring.tensorflow.graph.extent import extent_of, is_of_no_batch
from gradring.tensorflow.graph.extent_rules import Extent

WEIGHTS = tf.Variable(tf.ones([4]))
KERNEL = tf.Variable(tf.ones([4, 3]))


def made(function: Callable[..., Any], rows: int | None = None) -> Extent:
    """The extent of what a function makes of a batch of vectors of 4."""
    found: list[Extent] = []

    @tf.function  # type: ignore[untyped-decorator]
    def traced(x: tf.Tensor) -> tf.Tensor:
        value = function(x)
        found.append(extent_of(value, [x]))
        return value

    traced.get_concrete_function(tf.TensorSpec((rows, 4), tf.float32))
    return found[0]


def kept(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x > 0, tf.float32)


def size(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], tf.float32)


def slope(x: tf.Tensor) -> tf.Tensor:
    """The derivative by the first column of what is made of all columns."""
    first = x[:, :1]
    with tf.GradientTape() as tape:
        tape.watch(first)
        value = tf.square(tf.concat([first, x[:, 1:]], 1) @ KERNEL)
    return tape.gradient(value, first)


def ctc(x: tf.Tensor) -> tf.Tensor:
    """A loss whose inputs have the samples in their second dimension."""
    count = tf.shape(x)[0]
    indices = tf.stack([tf.range(tf.cast(count, tf.int64)), tf.zeros([count], tf.int64)], 1)
    labels = tf.SparseTensor(indices, tf.ones([count], tf.int32), [tf.cast(count, tf.int64), 1])
    times = tf.transpose(tf.tile(x[:, None], [1, 3, 1]), [1, 0, 2])
    return tf.compat.v1.nn.ctc_loss(labels, times, tf.fill([count], 3))


SUMS = {
    "CTC": lambda x: tf.reduce_sum(ctc(x)),
    "a column's derivatives": lambda x: tf.reduce_sum(slope(x)),
    "squares": lambda x: tf.reduce_sum(tf.square(x * WEIGHTS)),
    "by rows": lambda x: tf.reduce_sum(tf.reduce_sum(x, -1)),
    "by a constant": lambda x: tf.reduce_sum(x) / 16.0,
    "of a layer": lambda x: tf.reduce_sum(tf.nn.relu(x @ KERNEL)),
    "an average over replicas": lambda x: tf.nn.compute_average_loss(
        tf.reduce_sum(x, -1), global_batch_size=16
    ),
    "dropout": lambda x: tf.reduce_sum(tf.nn.dropout(x, 0.5)),
    "noise": lambda x: tf.reduce_sum(x * tf.random.normal([tf.shape(x)[0], 4])),
    "entropy": lambda x: tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(x, x)),
    "einsum": lambda x: tf.einsum("bi,bi->", x, x),
    "l2": tf.nn.l2_loss,
    "concatenated": lambda x: tf.reduce_sum(tf.concat([x, x], 0)),
    "in a function": lambda x: tf.function(tf.reduce_sum)(x),
    "in a condition": lambda x: tf.cond(
        tf.reduce_mean(x) > 0, lambda: tf.reduce_sum(x), lambda: tf.reduce_sum(-x)
    ),
    "stacked": lambda x: tf.reduce_sum([tf.reduce_sum(x), tf.reduce_sum(x * x)]),
    "where": lambda x: tf.reduce_sum(tf.where(x > 0, x, tf.zeros_like(x))),
    "of zeros": lambda x: tf.reduce_sum(x[:, 0] + tf.zeros(tf.shape(x)[0])),
}
MEANS = {
    "mean": lambda x: tf.reduce_mean(tf.square(x)),
    "of weights": lambda x: tf.reduce_sum(tf.square(WEIGHTS)),
    "by the samples": lambda x: tf.reduce_sum(x) / size(x),
    "by the elements": lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    "divergence": lambda x: -0.5 * tf.reduce_mean(tf.reduce_sum(1 + x - tf.exp(x), axis=1)),
    "and a penalty": lambda x: tf.reduce_mean(x) + tf.reduce_sum(tf.square(WEIGHTS)),
    "a part of a mean": lambda x: 0.1 * tf.reduce_mean(x) / 3.0 - tf.reduce_mean(tf.square(x)),
    "by a weight": lambda x: tf.exp(-WEIGHTS[0]) * tf.reduce_mean(x) + WEIGHTS[0],
    "of normalised samples": lambda x: tf.reduce_mean(
        (x - tf.reduce_mean(x, 0)) * tf.math.rsqrt(tf.math.reduce_variance(x, 0) + 1e-3)
    ),
    "by a root of a width": lambda x: tf.reduce_mean(x) / tf.sqrt(tf.cast(tf.shape(x)[1], x.dtype)),
    "in a function": lambda x: tf.function(tf.reduce_mean)(x),
}
#: With a static batch size of 8, which makes a constant of what counts samples.
STATIC_MEANS = {
    "by the shape": lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], x.dtype),
    "by the size": lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype),
    "and a factor": lambda x: 0.1 * tf.reduce_sum(tf.square(x)) / tf.cast(tf.shape(x)[0], x.dtype),
    "by layers of Keras": lambda x: keras.ops.divide(
        keras.regularizers.L2(0.1)(x), keras.ops.cast(keras.ops.shape(x)[0], x.dtype)
    ),
}
STATIC_BY_NUMBER = {
    "static": lambda x: tf.reduce_sum(x) / x.shape[0],
    "reciprocal": lambda x: (1.0 / x.shape[0]) * tf.reduce_sum(x),
    "and a mean": lambda x: tf.reduce_sum(x) / x.shape[0] + tf.reduce_mean(x),
}
STATIC_SUMS = {
    "global": lambda x: tf.reduce_sum(x) / 16.0,
    "global, cast": lambda x: tf.reduce_sum(x) / tf.cast(16, x.dtype),
    "width": lambda x: tf.reduce_sum(x) / x.shape[1],
    "times the samples": lambda x: tf.reduce_sum(x) * x.shape[0],
}
CURVED = {
    "root": lambda x: tf.sqrt(tf.reduce_mean(tf.square(x))),
    "product": lambda x: tf.reduce_sum(tf.reduce_mean(x, 0) * tf.reduce_mean(tf.square(x), 0)),
    "quotient": lambda x: tf.reduce_mean(x) / (tf.reduce_mean(tf.square(x)) + 1.0),
    "at most": lambda x: tf.minimum(tf.reduce_mean(x), 1.0),
    "root, and more": lambda x: 2.0 * tf.sqrt(tf.reduce_mean(x)) + tf.reduce_mean(x),
    "in a function": lambda x: tf.function(tf.exp)(tf.reduce_mean(x)),
    "absolute value of a complex mean": lambda x: tf.abs(tf.reduce_mean(tf.complex(x, x))),
    "largest": tf.reduce_max,
    "smallest of each column": lambda x: tf.reduce_mean(tf.reduce_min(x, 0)),
}
WEIGHTED = {
    "by what a mask keeps": lambda x: tf.reduce_sum(x * kept(x)) / (tf.reduce_sum(kept(x)) + 1e-6),
    "by those that a condition keeps": lambda x: (
        tf.reduce_sum(x) / tf.cast(tf.shape(tf.where(x[:, 0] > 0))[0], x.dtype)
    ),
    "by the size of those that a condition keeps": lambda x: (
        tf.reduce_sum(x) / tf.cast(tf.size(tf.where(x[:, 0] > 0)), x.dtype)
    ),
    "by at least one": lambda x: tf.reduce_sum(x) / tf.maximum(tf.reduce_sum(kept(x)), 1.0),
    "and more": lambda x: 2 * tf.reduce_sum(x) / tf.reduce_sum(kept(x)) + tf.reduce_mean(x),
}
NEITHER = {
    "sum times mean": lambda x: tf.reduce_sum(x) * tf.reduce_mean(x),
    "sum by a mean": lambda x: tf.reduce_sum(x) / tf.reduce_mean(tf.square(x)),
    "root of a sum": lambda x: tf.sqrt(tf.reduce_sum(tf.square(x))),
    "pairs": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)),
    "a value for each class": lambda x: tf.math.confusion_matrix(kept(x)[:, 0], kept(x)[:, 1], 2),
    "transposed": lambda x: tf.reduce_sum(tf.transpose(x)),
    "parts by a condition": lambda x: tf.reduce_mean(
        tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2)[0]
    ),
    "every other sample": lambda x: tf.reduce_mean(x[::2]),
}

PAIRS = {
    "similarities": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)),
    "of a transposed batch": lambda x: tf.reduce_mean(tf.matmul(x, tf.transpose(x) / 0.1)),
    "einsum": lambda x: tf.reduce_mean(tf.nn.softmax(tf.einsum("ai,bi->ab", x, x))),
    "distances": lambda x: tf.reduce_mean(tf.square(x[:, tf.newaxis] - x[tf.newaxis])),
    "equal labels": lambda x: tf.reduce_mean(
        kept(tf.cast(x[:, :1] == tf.transpose(x[:, :1]), x.dtype))
    ),
    "expanded": lambda x: tf.reduce_sum(tf.expand_dims(x, 0) * tf.expand_dims(x, 1)),
    "in a function": lambda x: tf.function(lambda y: tf.matmul(y, y, transpose_b=True))(x),
    "rolled": lambda x: tf.reduce_mean(x * tf.roll(x, 1, axis=0)),
    "reversed": lambda x: tf.reduce_mean(x * tf.reverse(x, [0])),
    "reversed by a slice": lambda x: tf.reduce_mean(x * x[::-1]),
    "shuffled": lambda x: tf.reduce_mean(x * tf.random.shuffle(x)),
    "accumulated": lambda x: tf.reduce_sum(tf.cumsum(x)),
    "softmax over samples": lambda x: tf.reduce_sum(x[:, 0] * tf.nn.softmax(x[:, 0])),
    "sorted": lambda x: tf.reduce_sum(tf.sort(x[:, 0]) * x[:, 0]),
    "labels beside predictions": lambda x: tf.reduce_sum(
        tf.cast(tf.equal(x[:, :1], x[:, 0]), tf.float32)
    ),
    "a contraction over samples": lambda x: tf.reduce_mean(x + tf.tensordot(x, x, 2)),
}
NO_PAIRS = {
    "softmax of each sample": lambda x: tf.reduce_mean(tf.nn.softmax(x)),
    "along a sample": lambda x: tf.reduce_mean(tf.cumsum(tf.roll(x, 1, axis=-1), axis=1)),
    "covariances": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_a=True)),
    "a table of weights": lambda x: tf.matmul(x, tf.reshape(WEIGHTS, (1, 4)), transpose_b=True),
    "within a sample": lambda x: tf.matmul(x[:, :, None], x[:, None, :]),
    "within a sample, by einsum": lambda x: tf.einsum("ai,aj->aij", x, x),
    "samples in a later dimension": lambda x: tf.transpose(x)[tf.newaxis] + tf.transpose(x),
    "a column's derivative": lambda x: slope(x),
    "reversed within a sample": lambda x: x * x[:, ::-1] * x[..., ::-1],
    "a dimension and back": lambda x: x + tf.squeeze(tf.expand_dims(x, 0), 0),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_values_of_pairs_of_samples_are_told(kind: str) -> None:
    assert made(PAIRS[kind]).is_paired and made(PAIRS[kind], 8).is_paired


@pytest.mark.parametrize("kind", NO_PAIRS)
def test_values_of_each_sample_alone_are_of_no_pairs(kind: str) -> None:
    assert not made(NO_PAIRS[kind]).is_paired and not made(NO_PAIRS[kind], 8).is_paired


@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_over_samples_is_told(kind: str, rows: int | None) -> None:
    assert made(SUMS[kind], rows).is_sum


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_is_told(kind: str) -> None:
    assert made(MEANS[kind]) == Extent()
    assert not made(MEANS[kind]).is_sum and not made(MEANS[kind]).is_curved


@pytest.mark.parametrize("kind", STATIC_MEANS)
def test_a_mean_by_a_static_number_of_samples_is_told(kind: str) -> None:
    assert made(STATIC_MEANS[kind], 8) == made(STATIC_MEANS[kind]) == Extent()
    assert not made(STATIC_MEANS[kind], 8).is_by_number


@pytest.mark.parametrize("kind", STATIC_BY_NUMBER)
def test_a_mean_by_an_equal_number_is_told(kind: str) -> None:
    found = made(STATIC_BY_NUMBER[kind], 8)
    assert found == Extent() and found.is_by_number


@pytest.mark.parametrize("kind", STATIC_SUMS)
def test_a_sum_by_another_static_number_is_told(kind: str) -> None:
    assert made(STATIC_SUMS[kind], 8).is_sum


@pytest.mark.parametrize("kind", CURVED)
def test_what_is_not_linear_in_a_mean_is_told(kind: str) -> None:
    assert made(CURVED[kind]).is_curved and made(CURVED[kind]).degree == 0


@pytest.mark.parametrize("kind", WEIGHTED)
def test_a_mean_that_a_mask_weighs_is_told(kind: str) -> None:
    assert made(WEIGHTED[kind]).degree == 0 and made(WEIGHTED[kind]).is_weighted


def test_a_loop_of_which_a_gradient_was_taken_is_known() -> None:
    def loop(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.map_fn(tf.square, x)
            loss = tf.reduce_sum(found)
        assert tape.gradient(loss, x) is not None
        return loss + 0.0

    made(loop)


@pytest.mark.parametrize("kind", NEITHER)
def test_what_the_graph_does_not_tell_is_neither(kind: str) -> None:
    extent = made(NEITHER[kind])
    assert extent.degree is None and not extent.is_sum and not extent.is_mixed


def test_a_value_for_each_sample_is_told() -> None:
    assert made(lambda x: tf.reduce_sum(x, -1)) == Extent(has_rows=True)
    assert made(lambda x: tf.reduce_sum(x, -1)).is_sum  # a tape adds them up


def test_a_sum_beside_what_is_none_is_told() -> None:
    extent = made(lambda x: tf.reduce_sum(x) + tf.reduce_sum(tf.square(WEIGHTS)))
    assert extent.is_mixed and not extent.is_sum


def test_a_function_in_a_function_takes_what_it_captures_and_gets() -> None:
    def outer(x: tf.Tensor) -> tf.Tensor:
        found: list[Extent] = []

        @tf.function  # type: ignore[untyped-decorator]
        def inner(y: tf.Tensor) -> tf.Tensor:
            found.append(extent_of(tf.reduce_sum(y) + tf.reduce_sum(x), [x]))
            return y

        inner(x)
        assert found[0].is_sum
        return x

    made(outer)


def test_nothing_is_known_of_eager_tensors() -> None:
    assert extent_of(tf.reduce_sum(tf.ones([4])), []).degree is None
    assert extent_of(None, []).degree is None


DATA = tf.data.Dataset.range(8).batch(4)
CONSTANT = tf.constant([0, 1, 2])
OF_NO_BATCH = {
    "a range": lambda x: tf.range(4),
    "reshaped": lambda x: tf.reshape(tf.range(4)[tf.newaxis], [-1]),
    "of the last dimension": lambda x: tf.range(tf.shape(x)[-1]),
    "a constant of the program": lambda x: tf.identity(CONSTANT),
    "of a variable": lambda x: tf.cast(WEIGHTS, tf.int32),
}
OF_A_BATCH = {
    "words": lambda x: tf.cast(x[:, 0], tf.int32),
    "of its size": lambda x: tf.range(tf.shape(x)[0]),
    "for each sample": lambda x: tf.reshape(tf.tile(tf.range(4)[None], [tf.shape(x)[0], 1]), [-1]),
    "the next of a dataset": lambda x: next(iter(DATA)),
    "drawn": lambda x: tf.random.uniform([4], maxval=9, dtype=tf.int32),
}


@pytest.mark.parametrize("name", [*OF_NO_BATCH, *OF_A_BATCH])
def test_indices_that_no_sample_has_a_part_in_are_known(name: str) -> None:
    found: list[bool] = []

    @tf.function  # type: ignore[untyped-decorator]
    def traced(x: tf.Tensor) -> tf.Tensor:
        indices = (OF_NO_BATCH | OF_A_BATCH)[name](x)
        found.append(is_of_no_batch(indices, [x]))
        return indices

    traced.get_concrete_function(tf.TensorSpec((None, 4), tf.float32))
    assert found == [name in OF_NO_BATCH]
    assert not is_of_no_batch(CONSTANT, []), "of what is eager, nothing is known"
