"""All-reduce of `tf.IndexedSlices`: the gradients of embeddings.

The default setting, ``embeddings="rows"``, gathers the rows of all ranks in rank order and does not
add them up. Keras' optimizers square rows of equal index one by one, so sums would train
differently from one process. Only the rows themselves can travel then. Indices that depend on no
sample, such as positions in a text, are equal on all ranks, and one process has each of them once.
Their values are reduced like dense ones.

The other setting, ``embeddings="sum"``, adds up rows of one index before they travel and once more
afterwards. It adds in the wide type in which the engine accumulates, so all ways below round the
same. Ranks choose a way when they know each other's numbers of rows, so all choose the same one.
A rank of N sends (N-1)/N of these bytes:

* *The rows*, gathered on all ranks: `rows x (row + index)` bytes for the rows of all ranks.
* *The rows to owners* (row_owners.py), which return the sums: fewer rows if ranks share indices,
  but one more collective.
* *The whole table*: an all-reduce of `2 x table` bytes.

So a table becomes dense only if its rows would take more bytes. Its size must be known when the
graph is traced; a table of unknown size always travels as rows.

A measurement decides only between the first two ways. Both add in the same order and return rows in
the same order, so results do not depend on measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tensorflow as tf

from gradring.gradients.reduction import Collective, Reduction
from gradring.group.communicator import Communicator, core_of
from gradring.tensorflow.graph import replica_step, row_owners, session_order
from gradring.tensorflow.graph.dtypes import as_native
from gradring.tensorflow.graph.extent import is_of_no_batch
from gradring.tensorflow.graph.rows import (
    add_rows,
    divided,
    gather_rows,
    numbers_of_all,
)
from gradring.tensorflow.graph.start_wait import ALL_TO_ALL_RANKS_MAX, reduce

#: Smallest table, in bytes, that is announced in the log when it becomes dense.
ANNOUNCED_BYTES = 1 << 30

#: Cost of one more collective without a measurement, as the bytes that could be sent meanwhile.
MESSAGE_BYTES = 256 << 10
#: Bounds of a measured cost.
MESSAGE_BYTES_BOUNDS = 4 << 10, 1 << 20

#: Cost of finding the owner of one row, as the bytes that could be sent meanwhile.
OWNER_BYTES = 64

#: Factor that spreads digests over all numbers.
_ODD = 0x1E3779B97F4A7C15

#: Values and their indices.
Rows: TypeAlias = tuple[tf.Tensor, tf.Tensor]

_logger = logging.getLogger(__name__)
_announced: set[str] = set()


def reduce_sparse(
    results: list[tf.Tensor | tf.IndexedSlices], positions: Sequence[int], reduction: Reduction
) -> None:
    """Replaces the `tf.IndexedSlices` at `positions` by their reductions.

    The results have the rows of all ranks, in rank order. If the reduction adds up rows of equal
    index, or the graph did so before, they have one row for each index of any rank. A table that
    traveled dense has all its rows.

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
    # TensorFlow 1 orders collectives in conditionals only inside a function.
    in_session = session_order.of_this_graph(reduction.names.of(positions).shown) is not None
    given = [results[position] for position in positions]

    def reduce_rows() -> list[Rows]:
        way = _summed if reduction.embeddings == "sum" else _rows_of_all
        return way(given, positions, reduction)

    reduced = tf.function(reduce_rows, autograph=False)() if in_session else reduce_rows()
    for position, own, rows in zip(positions, given, reduced, strict=True):
        whole = tf.IndexedSlices(*rows, own.dense_shape)
        adds_up = reduction.embeddings != "sum" and _has_each_index_once(own)
        results[position] = summed(whole) if adds_up else whole


def _has_each_index_once(gradient: tf.IndexedSlices) -> bool:
    """Returns whether the graph has added up rows, as `tf.nn.embedding_lookup_sparse` does.

    One process then has one row for each index, a sum over all samples, and optimizers square it.
    """
    if not tf.is_symbolic_tensor(gradient.indices):
        return False
    op = gradient.indices.op
    while op.type in ("Reshape", "Identity", "Cast"):
        op = op.inputs[0].op
    return op.type in ("Unique", "UniqueV2")


def _rows_of_all(
    given: Sequence[tf.IndexedSlices], positions: Sequence[int], reduction: Reduction
) -> list[Rows]:
    """Gathers the rows of all ranks; a mean divides each row."""
    batch = replica_step.current().batch
    are_added = [is_of_no_batch(each.indices, batch) for each in given]
    own_numbers = [tf.shape(each.values, tf.int64)[0] for each in given]
    own_numbers += [
        _digest(each.indices) for each, is_added in zip(given, are_added, strict=True) if is_added
    ]
    numbers = numbers_of_all(tf.stack(own_numbers), reduction.of(positions).part("rows"))
    counts, digests = (
        numbers[: len(given)],
        iter(tf.unstack(numbers, len(own_numbers))[len(given) :]),
    )
    each_of = [
        _Gathering(own, rows, reduction.of([position]))
        for own, rows, position in zip(
            given, tf.unstack(counts, len(given)), positions, strict=True
        )
    ]
    apart = iter(
        _gathered([one for one, added in zip(each_of, are_added, strict=True) if not added])
    )
    return [
        one.added(next(digests)) if is_added else next(apart)
        for one, is_added in zip(each_of, are_added, strict=True)
    ]


@dataclass(frozen=True)
class _Gathering:
    """Slices whose rows are gathered on every rank.

    Attributes:
        own: This rank's slices.
        counts: Every rank's number of rows.
        collective: Group, label, op and check.
    """

    own: tf.IndexedSlices
    counts: tf.Tensor
    collective: Collective

    def added(self, digests: tf.Tensor) -> Rows:
        """Reduces values place by place if all ranks' digests are equal; else gathers the rows.

        Args:
            digests: Every rank's digest of its indices.
        """
        own_numbers = tf.stack([digests, self.counts])
        way: Rows = tf.cond(
            tf.reduce_all(own_numbers == own_numbers[:, :1]),
            self._added,
            lambda: _gathered([self])[0],
        )
        return way

    def _added(self) -> Rows:
        own, label = self.own, self.collective.label
        native, decode = as_native(own.values, label.shown)
        (reduced,) = reduce([native], replace(self.collective, label=label.part("equal rows")))
        return decode(reduced), tf.convert_to_tensor(own.indices)


def _gathered(given: Sequence[_Gathering]) -> list[Rows]:
    tensors, counts, collectives = [], [], []
    for each in given:
        own, collective = each.own, each.collective
        tensors += [
            divided(own.values, _divisor(collective)),
            tf.convert_to_tensor(own.indices),
        ]
        counts += [each.counts, each.counts]
        collectives += [_values(collective), collective.part("indices")]
    # All tables are under way at once.
    gathered = gather_rows(tensors, counts, collectives)
    return list(zip(gathered[::2], gathered[1::2], strict=True))


def _digest(indices: tf.Tensor) -> tf.Tensor:
    """Returns an int64 digest of the indices and their order."""
    wide = tf.cast(tf.reshape(indices, [-1]), tf.int64) + 1
    weights = (2 * tf.range(tf.size(wide, tf.int64)) + 1) * tf.constant(_ODD, tf.int64)
    shifted = tf.bitwise.right_shift(weights, tf.constant(29, tf.int64))
    return tf.reduce_sum(wide * tf.bitwise.bitwise_xor(weights, shifted))


def _summed(
    given: Sequence[tf.IndexedSlices], positions: Sequence[int], reduction: Reduction
) -> list[Rows]:
    """Adds up the rows of each index over all ranks."""
    slices = [summed(each) for each in given]
    lengths = [tf.shape(own.values, tf.int64)[0] for own in slices]
    # Ranks can differ in these two numbers; all use the largest.
    said = [_message_bytes(reduction.communicator), int(bool(reduction.check_gradients))]
    own_numbers = tf.concat([lengths, tf.constant(said, tf.int64)], 0)
    # The name makes it a mismatch if another rank uses embeddings="rows".
    numbers = numbers_of_all(own_numbers, reduction.of(positions).part("rows, embeddings=sum"))
    *all_counts, message_bytes, checked = tf.unstack(numbers, len(slices) + 2)
    return [
        _Reducing(
            own,
            counts,
            tf.reduce_max(message_bytes),
            tf.reduce_max(checked) > 0,
            reduction.of([position]),
        ).reduced()
        for position, own, counts in zip(positions, slices, all_counts, strict=True)
    ]


def travels_dense(
    rows: int | tf.Tensor,
    moved: int | tf.Tensor,
    row_bytes: int,
    index_bytes: int,
    table_rows: int | tf.Tensor,
) -> bool | tf.Tensor:
    """Returns whether the table moves fewer bytes than `rows` indices and `moved` rows.

    Returns:
        A bool, or a boolean tensor if a number of rows is a tensor.
    """
    return moved * row_bytes + rows * index_bytes > 2 * table_rows * row_bytes


def moved_by_owners(
    rows: int | tf.Tensor, indices: int | tf.Tensor, world_size: int
) -> int | tf.Tensor:
    """Returns the number of rows in a gathering that would move as many bytes as owners do.

    Args:
        rows: Number of rows of all ranks.
        indices: Number of different indices among them.
        world_size: Number of ranks, above 1.
    """
    return indices + (rows - indices) // (world_size - 1)


def owners_may_pay(
    rows: int | tf.Tensor, moved: int | tf.Tensor, row_bytes: int
) -> bool | tf.Tensor:
    """Returns whether owners may save more than it costs to find them, without measured costs."""
    return (rows - moved) * row_bytes > MESSAGE_BYTES + OWNER_BYTES * rows


@dataclass(frozen=True)
class _Reducing:
    """One reduction of slices.

    Attributes:
        own: This rank's slices, each index once.
        counts: Every rank's number of rows.
        message_bytes: Cost of one more collective, as the bytes that could be sent meanwhile.
        checked: Whether some rank checks for rows that are not finite.
        collective: Group, label, op and check.
    """

    own: tf.IndexedSlices
    counts: tf.Tensor
    message_bytes: tf.Tensor
    checked: tf.Tensor
    collective: Collective

    def reduced(self) -> Rows:
        own, group = self.own, self.collective.communicator
        elements = own.values.shape[1:].num_elements()
        if elements is None:
            return self._gathered()
        row_bytes = elements * own.values.dtype.size
        rows = moved = tf.reduce_sum(self.counts)
        table = None if own.dense_shape is None else tf.get_static_value(own.dense_shape)
        # Owners never save rows between two ranks, and they need a mesh: all-to-all connections.
        may_pay: bool | tf.Tensor = False
        if 2 < group.world_size <= ALL_TO_ALL_RANKS_MAX:
            fewest = moved_by_owners(rows, tf.reduce_max(self.counts), group.world_size)
            may_pay = owners_may_pay(rows, fewest, row_bytes)
            most = rows if table is None else tf.minimum(rows, int(table[0]))
            moved = tf.where(may_pay, moved_by_owners(rows, most, group.world_size), rows)

        def by_rows() -> Rows:
            if may_pay is False:
                return self._gathered()
            way: Rows = tf.cond(may_pay, lambda: self._by_owners(row_bytes), self._gathered)
            return way

        if table is None:
            return by_rows()
        table_rows = int(table[0])
        dense = travels_dense(rows, moved, row_bytes, own.indices.dtype.size, table_rows)
        way: Rows = tf.cond(dense, lambda: self._as_table(table_rows, row_bytes), by_rows)
        return way

    def _as_table(self, table_rows: int, row_bytes: int) -> Rows:
        own, label = self.own, self.collective.label
        if table_rows * row_bytes >= ANNOUNCED_BYTES:
            _announce(label.shown, table_rows, row_bytes)
        dense = tf.math.unsorted_segment_sum(own.values, own.indices, table_rows)
        native, decode = as_native(dense, label.shown)
        (reduced,) = reduce([native], replace(self.collective, label=label.part("table")))
        return decode(reduced), tf.range(table_rows, dtype=own.indices.dtype)

    def _gathered(self) -> Rows:
        parts = [_values(self.collective), self.collective.part("indices")]
        counts = [self.counts] * 2
        values, indices = gather_rows([self.own.values, self.own.indices], counts, parts)
        total = summed(tf.IndexedSlices(values, indices), _divisor(self.collective))
        return total.values, total.indices

    def _by_owners(self, row_bytes: int) -> Rows:
        """Reduces by owners, unless one more collective costs more than the rows that they save."""
        own, collective, divisor = self.own, self.collective, _divisor(self.collective)
        (indices,) = gather_rows([own.indices], [self.counts], [collective.part("indices")])
        owners = row_owners.assign(indices, self.counts, collective.communicator.world_size)
        moved = owners.moved(self.checked)
        saved_bytes = (tf.reduce_sum(self.counts) - moved) * row_bytes

        def by_owners() -> tf.Tensor:
            return row_owners.reduce_by_owners(
                own.values, owners, self.counts, self.checked, collective, divisor
            )

        def gathered() -> tf.Tensor:
            (values,) = gather_rows([own.values], [self.counts], [_values(collective)])
            return add_rows(values, owners.places, tf.size(owners.indices), divisor)

        return tf.cond(saved_bytes > self.message_bytes, by_owners, gathered), owners.indices


def _values(collective: Collective) -> Collective:
    return replace(collective.part("values"), check=collective.check)


def _divisor(collective: Collective) -> int:
    return collective.communicator.world_size if collective.op == "mean" else 1


def _message_bytes(communicator: Communicator) -> int:
    """Returns the cost of one more collective, as measured when the group formed.

    The measured all-reduce has two steps. For B bytes it takes two latencies and sends 2B in our
    unit, so the factors of two cancel.
    """
    measured = core_of(communicator).stats()["algorithms"].get("direct")
    if measured is None or not measured["latency_s"] or not measured["seconds_per_byte"]:
        return MESSAGE_BYTES
    least, most = MESSAGE_BYTES_BOUNDS
    return int(min(max(measured["latency_s"] / measured["seconds_per_byte"], least), most))


def summed(value: tf.IndexedSlices, divisor: int = 1) -> tf.IndexedSlices:
    """Adds up the rows of each index; divides and rounds each sum once."""
    indices, places = tf.unique(tf.convert_to_tensor(value.indices))
    values = add_rows(value.values, places, tf.size(indices), divisor)
    return tf.IndexedSlices(values, indices, value.dense_shape)


def with_each_index_once(value: Any) -> Any:
    """Returns `summed` of `tf.IndexedSlices`; any other value is returned as is."""
    return summed(value) if isinstance(value, tf.IndexedSlices) else value


def _announce(name: str, rows: int, row_bytes: int) -> None:
    """Logs that a large table becomes dense: once for each variable, when it first happens."""

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
