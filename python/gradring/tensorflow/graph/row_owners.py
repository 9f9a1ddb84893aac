"""Rows that are added up by owners: each index belongs to one of the ranks that have it.

Every rank knows the indices of all, so all assign the same owners and know who sends what: nothing
but rows travels. A rank sends the rows that belong to others, each owner adds up what it has and
gets in the order of ranks, and the sums are gathered.

Of N ranks with S rows of U different indices, S-U rows go to owners, and each of U sums to N-1
ranks; to gather all rows, each of S goes to N-1 ranks. So owners pay where ranks share indices, and
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
    """Traces a function once, and not in every graph that calls it."""
    return tf.function(function, autograph=False, reduce_retracing=True)


class Owners(NamedTuple):
    """Who adds up which rows; the same on all ranks.

    Attributes:
        indices: Each index once; those of rank 0 first, then those of rank 1, and so on.
        places: Of each row of all ranks, in rank order, where its index is among `indices`.
        owners: Of each row of all ranks, who adds it up.
        counts: int64 of shape `[world_size]`: how many of the indices each rank owns.
        pairs: int64 of shape `[world_size, world_size]`: how many rows of a rank an owner adds up.
    """

    indices: tf.Tensor
    places: tf.Tensor
    owners: tf.Tensor
    counts: tf.Tensor
    pairs: tf.Tensor

    def moved(self, with_own: tf.Tensor) -> tf.Tensor:
        """How many rows travel, in the unit in which a gathering moves the rows of all ranks.

        Args:
            with_own: As for `reduce_by_owners`.
        """
        return tf.size(self.counts, tf.int64) * _chunk(self.pairs, with_own) + tf.reduce_sum(
            self.counts
        )


@_once
def assign(indices: tf.Tensor, counts: tf.Tensor, world_size: int) -> Owners:
    """Gives each index to one of the ranks that have it, so that all own about equally many.

    Args:
        indices: Of all ranks' rows, in rank order; those of one rank differ.
        counts: int64 of shape `[world_size]`: how many each rank has.
        world_size: How many ranks there are.
    """
    unique, places = tf.unique(indices, tf.int64)
    ranks = tf.repeat(tf.range(world_size, dtype=tf.int64), counts)
    # Of the ranks that have an index, the one with the largest random number.
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
    """The sums of all ranks' rows, divided and rounded once, in the order of `owners.indices`.

    Args:
        values: This rank's rows.
        owners: As `assign` has given.
        counts: int64 of shape `[world_size]`: how many rows each rank has.
        with_own: Whether ranks hand over also what they own, because it is to be looked at.
        collective: What it is part of.
        divisor: Of the sums.
    """
    group = collective.communicator
    parts, own = _parted(values, owners, counts, group.rank, group.world_size, with_own)
    encoded, decode = as_native_bits(parts, collective.label.shown)
    sending = replace(collective.part("to owners"), check=collective.check)
    # What a rank owns itself is added in its place, and need not go through the collective.
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
    """A chunk of rows for each owner, where zeros fill it up; and the rows that this rank owns."""
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
    """The sums of the rows that this rank owns, added in the order of ranks."""
    chunk = _chunk(owners.pairs, with_own)
    places = tf.boolean_mask(owners.places, owners.owners == rank)
    places -= tf.reduce_sum(owners.counts[:rank])
    # What fills chunks up is added in one place more.
    count = owners.counts[rank]
    of_chunks = _chunks(places, owners.pairs[:, rank], chunk, count)
    before, after = rank * chunk, (rank + 1) * chunk
    first = tf.reduce_sum(owners.pairs[:rank, rank])
    of_own = places[first : first + owners.pairs[rank, rank]]
    rows = tf.concat([received[:before], own, received[after:]], 0)
    places = tf.concat([of_chunks[:before], of_own, of_chunks[after:]], 0)
    return add_rows(rows, places, count + 1, divisor)[:-1]


def _chunk(pairs: tf.Tensor, with_own: tf.Tensor) -> tf.Tensor:
    """Rows that an all-to-all needs room for, from each rank to each."""
    to_others = tf.linalg.set_diag(pairs, tf.zeros_like(pairs[0]))
    return tf.reduce_max(tf.where(with_own, pairs, to_others))


def _chunks(
    numbers: tf.Tensor, counts: tf.Tensor, chunk: tf.Tensor, filling: tf.Tensor
) -> tf.Tensor:
    """The first `chunk` of each group of numbers, filled up; groups follow each other."""
    rows = tf.raw_ops.RaggedTensorToTensor(
        shape=tf.stack([tf.size(counts, tf.int64), chunk]),
        values=numbers,
        default_value=tf.cast(filling, numbers.dtype),
        row_partition_tensors=[tf.concat([[0], tf.cumsum(counts)], 0)],
        row_partition_types=["ROW_SPLITS"],
    )
    return tf.reshape(rows, [-1])


def _split(numbers: tf.Tensor, groups: tf.Tensor, count: int) -> list[tf.Tensor]:
    """The numbers of each group, in order."""
    return list(tf.dynamic_partition(numbers, tf.cast(groups, tf.int32), count))


def _histogram(numbers: tf.Tensor, size: int) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(tf.ones_like(numbers), numbers, size)


def _mixed(numbers: tf.Tensor) -> tf.Tensor:
    """Of each number of int64 one below 2^31, at random as far as anybody can tell."""
    mask, factor = (1 << 31) - 1, 0x45D9F3B
    mixed = tf.bitwise.bitwise_and(numbers, mask)
    for _ in range(2):
        mixed = tf.bitwise.bitwise_xor(mixed, mixed // (1 << 16))
        mixed = tf.bitwise.bitwise_and(mixed * factor, mask)
    return tf.bitwise.bitwise_xor(mixed, mixed // (1 << 16))
