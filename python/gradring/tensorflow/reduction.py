"""All-reduce of a list of tensors: dense ones in buckets, `tf.IndexedSlices` by their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.communicator import Communicator
from gradring.gradients import buckets
from gradring.gradients.checks import Check
from gradring.gradients.names import Names
from gradring.tensorflow.backward_order import start_as_soon_as_ready
from gradring.tensorflow.dtypes import as_native, as_tensor
from gradring.tensorflow.sparse import reduce_sparse
from gradring.tensorflow.start_wait import start, wait

_REDUCE_OPS = ("sum", "mean", "min", "max", "product")


def reduce_leaves(
    leaves: Sequence[Any],
    op: str,
    names: Names,
    communicator: Communicator,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
    check: str = "",
) -> list[Any]:
    """Reduces tensors and `tf.IndexedSlices`, listed in the order of their variables.

    Args:
      leaves: what to reduce.
      op: name of the reduce op.
      names: of the leaves.
      communicator: a `gradring.Communicator`.
      bucket_bytes: bound on the tensors that travel together, in bytes.
      check: what to do about leaves that are not finite: "warn", "raise", or nothing if empty.

    Returns:
      The results, in order.

    Raises:
      TypeError: a leaf is no tensor, or its dtype cannot be reduced.
      ValueError: `op` is unknown, or does not exist for `tf.IndexedSlices`.
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r} is no reduce op; use one of {', '.join(_REDUCE_OPS)}")
    sparse = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.IndexedSlices)]
    dense = sorted(set(range(len(leaves))) - set(sparse))
    results = list(leaves)
    _reduce_dense(results, dense, op, names, communicator, bucket_bytes, check)
    reduce_sparse(results, sparse, op, names, communicator, check)
    return results


def _reduce_dense(
    results: list[Any],
    positions: Sequence[int],
    op: str,
    names: Names,
    communicator: Communicator,
    bucket_bytes: int,
    check: str,
) -> None:
    """Replaces the tensors at `positions`."""
    # Last first: the order in which a backward pass produces gradients.
    backwards = list(reversed(positions))
    labels = [names.of([i]).shown for i in backwards]
    encoded = [
        as_native(as_tensor(results[i], label), label)
        for i, label in zip(backwards, labels, strict=True)
    ]
    packed = buckets.pack([_entry(tensor) for tensor, _ in encoded], bucket_bytes)
    tensors = [[encoded[i][0] for i in bucket.indices] for bucket in packed]
    started = [
        start(
            tensors[number],
            communicator,
            names.of([backwards[i] for i in bucket.indices], number if len(packed) > 1 else None),
            collective="all_reduce",
            reduce_op=op,
            check=Check(check, names.each([backwards[i] for i in bucket.indices])),
        )
        for number, bucket in enumerate(packed)
    ]
    start_as_soon_as_ready(tensors, [handle for *_, handle in started])
    for bucket, reduced in zip(packed, wait(started), strict=True):
        for index, tensor in zip(bucket.indices, reduced, strict=True):
            decode = encoded[index][1]
            results[backwards[index]] = decode(tensor)


def _entry(tensor: Any) -> buckets.Entry:
    count = tensor.shape.num_elements()
    size_bytes = None if count is None else count * tensor.dtype.size
    return buckets.Entry(tensor.dtype.name, size_bytes)
