"""Sums of rows by owners: each index belongs to one of the ranks that have it.

Every rank knows the indices of all ranks. So all ranks assign the same owners and know all senders
and receivers, and only rows travel. A rank sends rows to their owners. Each owner adds up its own
and the received rows, in the order of ranks. The sums are gathered.

N ranks have S rows of U different indices. Owners receive S-U rows and send each of U sums to N-1
ranks. A gathering sends each of S rows to N-1 ranks. So owners pay if ranks share indices, and
never between two ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.tensorflow.graph.dtypes import as_native_bits
from gradring.tensorflow.graph.rows import add_rows, gather_rows
from gradring.tensorflow.graph.start_wait import start_all_to_all, wait


def _once(function: Any) -> Any:
    """Makes a function be traced once, and not again in every graph that calls it."""
    return tf.function(function, autograph=False, reduce_retracing=True)


class Owners(NamedTuple):
    """Assignment of rows to owners, equal on all ranks.

    Attributes:
        indices: Each index once; those that rank 0 owns first, then those of rank 1, and so on.
        places: For each row of all ranks, in rank order, the position of its index in `indices`.
        owners: For each row of all ranks, in rank order, the rank of its owner.
        counts: int64 of shape `[world_size]`: number of indices that each rank owns.
        pairs: int64 of shape `[world_size, world_size]`: number of rows of a rank (first dimension)
            for an owner (second dimension).
    """

    indices: tf.Tensor
    places: tf.Tensor
    owners: tf.Tensor
    counts: tf.Tensor
    pairs: tf.Tensor

    def moved(self, with_own: tf.Tensor) -> tf.Tensor:
        """Returns the number of rows in a gathering that would move as many bytes.

        Args:
            with_own: As for `reduce_by_owners`.
        """
        return tf.size(self.counts, tf.int64) * _chunk(self.pairs, with_own) + tf.reduce_sum(
            self.counts
        )


@_once
def assign(indices: tf.Tensor, counts: tf.Tensor, world_size: int) -> Owners:
    """Gives each index to one of the ranks that have it, so that all ranks own about equally many.

    Args:
        indices: Indices of all ranks' rows, in rank order; each rank has an index at most once.
        counts: int64 of shape `[world_size]`: number of rows of each rank.
        world_size: Number of ranks.
    """
    unique, places = tf.unique(indices, tf.int64)
    ranks = tf.repeat(tf.range(world_size, dtype=tf.int64), counts)
    # The owner of an index is the rank with the largest random number among those that have it.
    drawn = _mixed(places * world_size + ranks) * world_size + ranks
    owner = tf.math.unsorted_segment_max(drawn, places, tf.size(unique)) % world_size
    order = tf.concat(_split(tf.range(tf.size(owner)), owner, world_size), 0)
    places = tf.gather(tf.cast(tf.math.invert_permutation(order), tf.int64), places)
    owners = tf.gather(tf.gather(owner, order), places)
    pairs = _histogram(ranks * world_size + owners, world_size**2)
    return Owners(
        tf.gather(unique, order),
        places,
        owners,
        _histogram(owner, world_size),
        tf.reshape(pairs, [world_size] * 2),
    )


def reduce_by_owners(
    values: tf.Tensor,
    owners: Owners,
    counts: tf.Tensor,
    with_own: tf.Tensor,
    collective: Collective,
    divisor: int,
) -> tf.Tensor:
    """Returns the sums of all ranks' rows, divided and rounded once, in the order of the indices.

    Args:
        values: This rank's rows.
        owners: Result of `assign`.
        counts: int64 of shape `[world_size]`: number of rows of each rank.
        with_own: Whether a rank passes the rows that it owns to the collective as well, so that the
            check for values that are not finite sees them.
        collective: The reduction that this is a part of.
        divisor: Divisor of the sums.
    """
    group = collective.communicator
    parts, own = _parted(values, owners, counts, group.rank, group.world_size, with_own)
    encoded, decode = as_native_bits(parts, collective.label.shown)
    sending = replace(collective.part("to owners"), check=collective.check)
    # Rows that a rank owns itself are added from its own memory; the target in flight is zeros.
    started = start_all_to_all(encoded, sending, tf.zeros_like(encoded))
    ((_, received),) = wait([started])
    sums = _added(decode(received), own, owners, group.rank, with_own, divisor)
    (gathered,) = gather_rows([sums], [owners.counts], [collective.part("from owners")])
    return gathered


@_once
def _parted(
    values: tf.Tensor,
    owners: Owners,
    counts: tf.Tensor,
    rank: int,
    world_size: int,
    with_own: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a chunk of rows for each owner, padded with zeros, and the rows this rank owns."""
    first = tf.reduce_sum(counts[:rank])
    owner = owners.owners[first : first + counts[rank]]
    rows = _split(tf.range(tf.size(owner)), owner, world_size)
    chunk = _chunk(owners.pairs, with_own)
    taken = _chunks(tf.concat(rows, 0), owners.pairs[rank], chunk, tf.size(owner))
    padded = tf.pad(values, [[0, 1]] + [[0, 0]] * (values.shape.rank - 1))
    return tf.gather(padded, taken), tf.gather(values, rows[rank])


@_once
def _added(
    received: tf.Tensor,
    own: tf.Tensor,
    owners: Owners,
    rank: int,
    with_own: tf.Tensor,
    divisor: int,
) -> tf.Tensor:
    """Returns the sums of the rows that this rank owns, added in the order of ranks."""
    chunk = _chunk(owners.pairs, with_own)
    places = tf.boolean_mask(owners.places, owners.owners == rank)
    places -= tf.reduce_sum(owners.counts[:rank])
    # Padding is added up in one extra place, which is dropped at the end.
    count = owners.counts[rank]
    of_chunks = _chunks(places, owners.pairs[:, rank], chunk, count)
    before, after = rank * chunk, (rank + 1) * chunk
    first = tf.reduce_sum(owners.pairs[:rank, rank])
    of_own = places[first : first + owners.pairs[rank, rank]]
    rows = tf.concat([received[:before], own, received[after:]], 0)
    places = tf.concat([of_chunks[:before], of_own, of_chunks[after:]], 0)
    return add_rows(rows, places, count + 1, divisor)[:-1]


def _chunk(pairs: tf.Tensor, with_own: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a chunk: the most that any rank sends to any other."""
    to_others = tf.linalg.set_diag(pairs, tf.zeros_like(pairs[0]))
    return tf.reduce_max(tf.where(with_own, pairs, to_others))


def _chunks(
    numbers: tf.Tensor, counts: tf.Tensor, chunk: tf.Tensor, filling: tf.Tensor
) -> tf.Tensor:
    """Cuts consecutive groups of numbers to `chunk` each, and pads shorter ones with `filling`."""
    rows = tf.raw_ops.RaggedTensorToTensor(
        shape=tf.stack([tf.size(counts, tf.int64), chunk]),
        values=numbers,
        default_value=tf.cast(filling, numbers.dtype),
        row_partition_tensors=[tf.concat([[0], tf.cumsum(counts)], 0)],
        row_partition_types=["ROW_SPLITS"],
    )
    return tf.reshape(rows, [-1])


def _split(numbers: tf.Tensor, groups: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Splits numbers by their group, in order."""
    return list(tf.dynamic_partition(numbers, tf.cast(groups, tf.int32), count))


def _histogram(numbers: tf.Tensor, size: int) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(tf.ones_like(numbers), numbers, size)


def _mixed(numbers: tf.Tensor) -> tf.Tensor:
    """Hashes each int64 to a number below 2^31."""
    mask, factor = (1 << 31) - 1, 0x45D9F3B
    mixed = tf.bitwise.bitwise_and(numbers, mask)
    for _ in range(2):
        mixed = tf.bitwise.bitwise_xor(mixed, mixed // (1 << 16))
        mixed = tf.bitwise.bitwise_and(mixed * factor, mask)
    return tf.bitwise.bitwise_xor(mixed, mixed // (1 << 16))
