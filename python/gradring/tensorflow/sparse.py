"""All-reduce of `tf.IndexedSlices`: the gradients of embeddings.

Rows of one index are summed before they travel and once more after, in the wide type in which the
engine accumulates too, so that both ways round alike. What travels is chosen when the ranks know
each other's numbers of rows, so all choose alike:

* *the rows*: an all-gather moves `rows x (row + index)` bytes, where rows are those of all ranks;
* *the whole table*, where that is less: an all-reduce moves `2 x table` bytes.

So a table is made dense only where its rows would take more memory. Its size must be known when
the graph is traced; a table of unknown size always travels as rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from gradring.gradients.reduction import Collective, Reduction
from gradring.tensorflow.dtypes import accumulator, as_native
from gradring.tensorflow.rows import gather_rows, row_counts
from gradring.tensorflow.start_wait import reduce

#: Size from which on a table that becomes dense is announced, in bytes.
ANNOUNCED_BYTES = 1 << 30

_logger = logging.getLogger(__name__)
_announced: set[str] = set()


def reduce_sparse(
    results: list[tf.Tensor | tf.IndexedSlices], positions: Sequence[int], reduction: Reduction
) -> None:
    """Replaces the `tf.IndexedSlices` at `positions` by their reductions.

    The results have one row for each index that occurs on any rank, or all rows of the table.

    Raises:
        ValueError: The op is neither "sum" nor "mean".
    """
    if not positions:
        return
    if reduction.op not in ("sum", "mean"):
        raise ValueError(
            f"{reduction.names.of(positions).shown}: op={reduction.op!r} does not exist for "
            "tf.IndexedSlices; use tf.convert_to_tensor to make it dense"
        )
    # Last first, as for dense gradients.
    positions = list(reversed(positions))
    slices = [summed(results[position]) for position in positions]
    all_counts = row_counts([s.values for s in slices], reduction.of(positions))
    for position, own, counts in zip(positions, slices, all_counts, strict=True):
        results[position] = _reduced(own, counts, reduction.of([position]))


def travels_dense(
    rows: int | tf.Tensor, row_bytes: int, index_bytes: int, table_rows: int
) -> bool | tf.Tensor:
    """Whether the table moves fewer bytes than the rows of all ranks do.

    Returns:
        A bool, or one as a tensor where `rows` is an integer as a tensor.
    """
    return rows * (row_bytes + index_bytes) > 2 * table_rows * row_bytes


def _reduced(own: tf.IndexedSlices, counts: tf.Tensor, collective: Collective) -> tf.IndexedSlices:
    table = None if own.dense_shape is None else tf.get_static_value(own.dense_shape)
    row_count = own.values.shape[1:].num_elements()
    shown = collective.label.shown

    def by_rows() -> tuple[tf.Tensor, tf.Tensor]:
        parts = [
            replace(collective.part("values"), check=collective.check),
            collective.part("indices"),
        ]
        values, indices = gather_rows([own.values, own.indices], counts, parts)
        divisor = collective.communicator.world_size if collective.op == "mean" else 1
        total = summed(tf.IndexedSlices(values, indices), divisor)
        return total.values, total.indices

    if table is None or row_count is None:
        return tf.IndexedSlices(*by_rows(), own.dense_shape)
    row_bytes = row_count * own.values.dtype.size

    def as_table() -> tuple[tf.Tensor, tf.Tensor]:
        if table[0] * row_bytes >= ANNOUNCED_BYTES:
            _announce(shown, int(table[0]), row_bytes)
        dense = tf.math.unsorted_segment_sum(own.values, own.indices, table[0])
        native, decode = as_native(dense, shown)
        whole = replace(collective, label=collective.label.part("table"))
        (reduced,) = reduce([native], whole)
        return decode(reduced), tf.range(table[0], dtype=own.indices.dtype)

    dense = travels_dense(tf.reduce_sum(counts), row_bytes, own.indices.dtype.size, int(table[0]))
    return tf.IndexedSlices(*tf.cond(dense, as_table, by_rows), own.dense_shape)


def summed(value: tf.IndexedSlices, divisor: int = 1) -> tf.IndexedSlices:
    """The same slices with one row for each index: the sum of its rows, divided, rounded once."""
    indices, segments = tf.unique(tf.convert_to_tensor(value.indices))
    wide = tf.cast(value.values, accumulator(value.values.dtype))
    values = tf.math.unsorted_segment_sum(wide, segments, tf.size(indices))
    if divisor > 1 and wide.dtype.is_integer:
        values = tf.truncatediv(values, tf.constant(divisor, wide.dtype))
    elif divisor > 1:
        values *= tf.constant(1 / divisor, wide.dtype)
    return tf.IndexedSlices(tf.cast(values, value.values.dtype), indices, value.dense_shape)


def _announce(name: str, rows: int, row_bytes: int) -> None:
    """Says, once for each variable and when it happens, that a large table becomes dense."""

    def say() -> int:
        if name not in _announced:
            _announced.add(name)
            _logger.warning(
                "'%s': so many of its %d rows have gradients that the table is reduced as a dense "
                "tensor of %.1f GB; smaller batches keep it sparse",
                name,
                rows,
                rows * row_bytes / 1e9,
            )
        return rows

    tf.numpy_function(say, [], tf.int64)
