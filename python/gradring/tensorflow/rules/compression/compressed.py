"""`gradring.updates.AllReduce.compression`: gradients are sent in fewer bytes.

Only dense float32 gradients of two or more dimensions are compressed. Biases and other vectors are
small, and training is sensitive to their errors. Embedding gradients are reduced as rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from gradring import updates
from gradring.gradients.buckets import Entry
from gradring.gradients.checks import Embeddings
from gradring.gradients.names import Names
from gradring.gradients.reduction import Reduction
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.graph.reduction import reduce_leaves
from gradring.tensorflow.rules.compression.bits16 import Bits16
from gradring.tensorflow.rules.compression.bucket import Bucket, Compressor, Memory, reduce_all
from gradring.tensorflow.rules.compression.int8 import Int8
from gradring.tensorflow.rules.compression.owners import SumByOwners
from gradring.tensorflow.rules.compression.power_sgd import LowRank
from gradring.tensorflow.rules.compression.top_k import LargestElements
from gradring.tensorflow.rules.updates import (
    Apply,
    Gradient,
    RoundOfParts,
    UpdatesInRounds,
    own,
)

#: Bound on a bucket's size in bytes. A bucket should fit in cache, and one bucket is compressed
#: while others are being sent. At 16 MiB, int8 was slower by a sixth.
_BUCKET_BYTES = 4 << 20


def compressor_of(compression: updates.Compression) -> Compressor:
    """Returns the `Compressor` of a compression."""
    match compression:
        case updates.Int8():
            return SumByOwners(Int8())
        case updates.Bits16(dtype):
            return SumByOwners(Bits16(dtype))
        case updates.TopK(fraction):
            return LargestElements(fraction)
        case updates.PowerSGD(rank):
            return LowRank(rank)


class CompressedUpdates(UpdatesInRounds):
    """Sums compressed gradients; every rank applies the sums.

    A round lasts as long as the optimizer, because each step keeps its compression error for the
    next one.
    """

    def __init__(
        self,
        compression: updates.Compression,
        communicator: Communicator,
        bucket_bytes: int,
        embeddings: Embeddings,
    ) -> None:
        """Takes the compression, and the arguments of the strategy."""
        super().__init__()
        self._compressor = compressor_of(compression)
        self._communicator = communicator
        self._embeddings: Embeddings = embeddings
        self._bucket_bytes = min(bucket_bytes, _BUCKET_BYTES)

    def begin(self, optimizer: Any) -> RoundOfParts[Memory]:
        """Begins a round without compression errors."""
        return RoundOfParts(optimizer, lambda variables: Memory(own(variables[0]).device))

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Sums large gradients compressed and others plainly, and applies the sums."""
        if self._communicator.world_size == 1:
            apply(gradients)
            return
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        large = [index for index in present if self._takes(gradients[index])]
        sums = list(gradients)
        for some, reduce in ((sorted({*present} - {*large}), self._plain), (large, self._summed)):
            leaves = [gradients[index] for index in some]
            results = reduce(optimizer, leaves, [variables[index] for index in some])
            for index, result in zip(some, results, strict=True):
                sums[index] = result
        with alone():
            apply(sums)

    def sync(self, variables: Iterable[Any]) -> None:
        """Does nothing, because the replicas are equal after every step."""

    def forget(self, variables: Iterable[Any]) -> None:
        """Clears the compression errors, which belong to earlier values of the variables."""
        for memories in self.about(variables):
            memories.clear()

    def note_loaded(self, variables: Iterable[Any]) -> None:
        """Clears the compression errors as `forget` does."""
        self.forget(variables)

    def _takes(self, gradient: Gradient) -> bool:
        """Returns whether a gradient is compressed."""
        return (
            isinstance(gradient, tf.Tensor)
            and gradient.dtype == tf.float32
            and gradient.shape.is_fully_defined()
            and len(gradient.shape) >= 2
            and gradient.shape.num_elements() > 0
            and self._compressor.takes(gradient.shape.as_list())
        )

    def _plain(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        return reduce_leaves(gradients, self._reduction("sum", gradients, variables))

    def _summed(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Sequence[Any]:
        reduction = self._reduction("compressed sum", gradients, variables)
        # Last first, because a backward pass produces gradients in this order.
        order = reversed(range(len(gradients)))
        entries = {i: Entry("float32", 4 * gradients[i].shape.num_elements()) for i in order}
        packed = reduction.buckets(entries)
        memories, unit = self.round_of(optimizer), _loss_scale(optimizer)
        buckets = [
            Bucket(
                [gradients[index] for index in members],
                collective,
                memories.of([variables[index] for index in members]),
                unit,
            )
            for members, collective in packed
        ]
        sums = list(gradients)
        for (members, _), bucket, vector in zip(
            packed, buckets, reduce_all(buckets, self._compressor.reduce), strict=True
        ):
            for index, total in zip(members, bucket.split(vector), strict=True):
                sums[index] = total
        return sums

    def _reduction(
        self, label: str, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Reduction:
        names = Names.of_variables(label, gradients, variables)
        return Reduction(
            self._communicator, names, "sum", self._bucket_bytes, embeddings=self._embeddings
        )


def _loss_scale(optimizer: Any) -> tf.Tensor | None:
    """Returns the factor of a `LossScaleOptimizer`'s gradients in this step, or None."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else tf.convert_to_tensor(own(scale))
