"""Ways to send gradients in fewer bytes, as values, for `gradring.updates.AllReduce`.

All of them lose a part of the gradient, and send this part later: a rank adds it to its gradient of
the next step (error feedback). So the sum of all applied gradients stays near the sum of all
computed ones, however long a training is.

See F. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014, and S. P. Karimireddy et al., "Error
feedback fixes SignSGD and other gradient compression schemes", arXiv 1901.09847.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeAlias, get_args

from gradring.config.parse import shown
from gradring.errors import ConfigError

#: Dtypes of `Bits16`.
TypeOf16Bits: TypeAlias = Literal["bfloat16", "float16"]
TYPES_OF_16_BITS: tuple[TypeOf16Bits, ...] = get_args(TypeOf16Bits)


@dataclass(frozen=True)
class Int8:
    """A byte for each element, and a scale for each block of 256: a quarter of the bytes.

    A block is divided by its largest absolute value and rounded to -127 to 127. The ranks send each
    part to its owner. Owners sum in float32 and send the sums in the same way.

    See T. Dettmers, "8-bit approximations for parallelism in deep learning", arXiv 1511.04561, and
    T. Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv 2110.02861; here,
    numbers are evenly spaced.

    Examples:
        >>> rule = gradring.updates.AllReduce(gradring.updates.Int8())
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     kernel, optimizer = tf.Variable(tf.zeros([32, 32])), keras.optimizers.SGD(1.0)
        ...     optimizer.build([kernel])
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, kernel)])
        >>> before = comm.stats()["bytes_sent"]
        >>> strategy.run(replica_step, args=(tf.fill([32, 32], 0.5),))
        >>> float(kernel[0, 0]), comm.stats()["bytes_sent"] - before  # 4096 without compression
        (-1.0, 1040)
    """


@dataclass(frozen=True)
class Bits16:
    """Half the bytes: ranks send 16-bit floats to the owners of parts, which sum in float32.

    Attributes:
        dtype: "bfloat16" (default), which has the range of float32, or "float16", which has more
            digits and is infinite above 65504.

    Raises:
        gradring.errors.ConfigError: `dtype` has another value.

    Examples:
        >>> rule = gradring.updates.AllReduce(gradring.updates.Bits16("bfloat16"))
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     kernel, optimizer = tf.Variable(tf.zeros([1, 1])), keras.optimizers.SGD(1.0)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, kernel)])
        >>> for step in range(3):
        ...     strategy.run(replica_step, args=(tf.constant([[0.505]]),))
        ...     print(float(kernel[0, 0]))  # what is lost is in the next
        -1.0078125
        -2.0234375
        -3.03125
    """

    dtype: TypeOf16Bits = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in TYPES_OF_16_BITS:
            raise _wrong(self, "dtype", f"is none of {', '.join(TYPES_OF_16_BITS)}; correct it")


@dataclass(frozen=True)
class TopK:
    """The elements of largest absolute value, with their positions: 8 bytes for each one.

    Every rank chooses its own elements, and receives those of all others. So the bytes grow with
    the number of ranks.

    See A. F. Aji and K. Heafield, "Sparse communication for distributed gradient descent", arXiv
    1704.05021, and Y. Lin et al., "Deep gradient compression", arXiv 1712.01887; their momentum
    correction is not included here.

    Attributes:
        fraction: Fraction of a bucket's elements that a rank sends, above 0 and up to 1; default
            0.01.

    Raises:
        gradring.errors.ConfigError: `fraction` has another value.

    Examples:
        >>> rule = gradring.updates.AllReduce(gradring.updates.TopK(0.5))
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     kernel, optimizer = tf.Variable(tf.zeros([2, 2])), keras.optimizers.SGD(1.0)
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, kernel)])
        >>> for gradient in ([[4.0, 1.0], [2.0, 3.0]], [[0.0, 0.0], [0.0, 0.0]]):
        ...     strategy.run(replica_step, args=(tf.constant(gradient) / 2,))
        ...     print(kernel.numpy().tolist())  # two of four, and the others in the next
        [[-4.0, 0.0], [0.0, -3.0]]
        [[-4.0, -1.0], [-2.0, -3.0]]
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        value = self.fraction
        if not (isinstance(value, Real) and math.isfinite(value) and 0 < float(value) <= 1):
            raise _wrong(self, "fraction", "is not a number above 0 and up to 1; correct it")
        object.__setattr__(self, "fraction", float(value))


@dataclass(frozen=True)
class PowerSGD:
    """A matrix of n rows and m columns as the product of two, of n x rank and rank x m elements.

    A kernel of more dimensions counts as a matrix whose columns are its last dimension. A matrix
    that would not become smaller is sent uncompressed.

    See T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: practical low-rank gradient
    compression for distributed optimization", arXiv 1905.13727.

    Attributes:
        rank: Rank of the product; default 4.

    Raises:
        gradring.errors.ConfigError: `rank` is not a whole number above 0.

    Examples:
        >>> rule = gradring.updates.AllReduce(gradring.updates.PowerSGD(rank=1))
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     kernel, optimizer = tf.Variable(tf.zeros([32, 32])), keras.optimizers.SGD(1.0)
        ...     optimizer.build([kernel])
        >>> def replica_step(gradient):
        ...     optimizer.apply_gradients([(gradient, kernel)])
        >>> before = comm.stats()["bytes_sent"]
        >>> strategy.run(replica_step, args=(tf.fill([32, 32], 0.5),))
        >>> round(float(kernel[0, 0]), 3), comm.stats()["bytes_sent"] - before  # 4096 without
        (-1.0, 256)
    """

    rank: int = 4

    def __post_init__(self) -> None:
        value = self.rank
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise _wrong(self, "rank", "is not a whole number above 0; correct it")
        object.__setattr__(self, "rank", int(value))


Compression: TypeAlias = Int8 | Bits16 | TopK | PowerSGD
"""A compression, an argument of `AllReduce`, for annotations and `isinstance`.

Examples:
    >>> by_name: dict[str, gradring.updates.Compression] = {
    ...     "half": gradring.updates.Bits16(),
    ...     "quarter": gradring.updates.Int8(),
    ... }
    >>> gradring.updates.AllReduce(by_name["quarter"])
    AllReduce(compression=Int8(), sync_every=1)
"""


def _wrong(value: Compression, name: str, problem: str) -> ConfigError:
    return ConfigError(f"{type(value).__name__}: {name}={shown(getattr(value, name))} {problem}")
