"""Gradient reduction without a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tensorflow as tf

from gradring.gradients import buckets, checks
from gradring.gradients.names import Label, Names, with_gaps
from gradring.gradients.reduction import Collective, Reduction
from gradring.group.arrays import ReduceOp
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.dtypes import accumulator, as_tensor, map_values
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.ops import group_of
from gradring.tensorflow.graph.reduction import Variable, reduce_leaves, with_known_shapes
from gradring.tensorflow.graph.start_wait import eager_step, reduce
from gradring.tensorflow.replicas import compare_beginnings


class GradientReducer:
    """Averages gradients over all ranks, eagerly and inside a `tf.function`.

    Examples:
        >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        >>> gradring.tensorflow.broadcast_variables(model.variables)
        >>> weights, optimizer = model.trainable_variables, keras.optimizers.SGD()
        >>> reduce_gradients = gradring.tensorflow.GradientReducer()
        >>> @tf.function
        ... def train_step(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        ...     gradients = reduce_gradients(tape.gradient(loss, weights), weights)
        ...     optimizer.apply_gradients(zip(gradients, weights))
        >>> train_step(tf.constant([[1.0 + rank]]), tf.constant([[2.0]]))
        >>> gradring.tensorflow.check_replicas(weights)  # raises if a bit differs
    """

    def __init__(
        self,
        op: ReduceOp = "mean",
        bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
        communicator: Communicator | None = None,
        *,
        check_gradients: checks.CheckGradients | None = None,
        embeddings: checks.Embeddings = "rows",
    ) -> None:
        """Makes a reducer, without communication.

        Args:
            op: "mean" (default) for losses averaged over each rank's own batch, or any other op of
                `all_reduce`.
            bucket_bytes: Bound on the gradients of one collective, in bytes; default 16 MiB.
            communicator: As for `all_reduce`.
            check_gradients: "warn", "raise" or None, as for `CustomCollectiveStrategy`.
            embeddings: "rows" (default) or "sum", as for `CustomCollectiveStrategy`; the same on
                every rank.

        Raises:
            gradring.errors.ConfigError: `op` is unknown, `bucket_bytes` is not above 0,
                `communicator` is no `Communicator`, or `check_gradients` or `embeddings` has
                another value.
        """
        checks.check_op(op)
        checks.check_communicator(communicator)
        buckets.check(bucket_bytes)
        checks.check(check_gradients)
        checks.check_embeddings(embeddings)
        self._embeddings: checks.Embeddings = embeddings
        self._check_gradients = check_gradients
        self._op = op
        self._bucket_bytes = bucket_bytes
        self._communicator = communicator
        self._has_compared = False

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        variables: Sequence[Variable | str] | None = None,
        samples: int | tf.Tensor | None = None,
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Reduces the gradients of one step, in the sense of `gradring.Communicator.step`.

        Args:
            gradients: Tensors of any shapes and of the dtypes that `all_reduce` takes, in the order
                of their variables, the same on every rank. None stays None and must be None on
                every rank. `tf.IndexedSlices` as in `all_reduce`.
            variables: Variables of the gradients, or names, one for each gradient. They are shown
                in messages and compared between ranks. The first call logs a warning if these
                variables have different values on some rank.
            samples: Number of samples in this rank's mean, a scalar that may be 0. The result is
                then the mean over the samples of all ranks, as one process would compute it. This
                costs one more reduction, of 8 bytes. Either all ranks pass it or none. Default: all
                ranks have equal weight.

        Returns:
            The reduced gradients, in the same order.

        Raises:
            TypeError: As for `all_reduce`; or `samples` with integer gradients.
            ValueError: As for `all_reduce`; or `samples` with another op than "mean", or not a
                scalar; or the numbers of variables and gradients differ.
            tf.errors.AbortedError: As for `all_reduce`.
            tf.errors.DeadlineExceededError: As for `all_reduce`.

        Examples:
            >>> reduce_gradients = gradring.tensorflow.GradientReducer()
            >>> own = tf.constant(rank + 1.0)
            >>> float(reduce_gradients([own])[0])
            1.5
            >>> samples = 3 if rank == 0 else 1
            >>> float(reduce_gradients([own], samples=samples)[0])  # 3/4 of 1, 1/4 of 2
            1.25
        """
        gradients = list(gradients)
        if samples is not None and self._op != "mean":
            raise ValueError(f"samples weigh a mean, and have no meaning for op={self._op!r}")
        if variables is not None and len(variables) != len(gradients):
            raise ValueError(f"{len(variables)} variables cannot have {len(gradients)} gradients")
        if variables is not None:
            with_known_shapes(gradients, variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        leaves = [gradients[i] for i in present]
        named = None if variables is None else [variables[i] for i in present]
        label = with_gaps("gradients", gradients)
        names = Names.of_variables(label, leaves, None)
        with falls_back("the names of gradients in messages", "messages have their numbers"):
            names = Names.of_variables(label, leaves, named)
        reduction = Reduction(
            group_of(self._communicator),
            names,
            self._op if samples is None else "sum",
            self._bucket_bytes,
            self._check_gradients,
            self._embeddings,
            of_own_samples=True,
        )
        if variables and not self._has_compared:
            values = [each for each in variables if not isinstance(each, str)]
            self._has_compared = compare_beginnings(values, reduction.communicator)
        with eager_step(reduction.communicator):
            if samples is not None:
                share = _share(samples, reduction)
                leaves = [map_values(partial(_weighted, share), leaf) for leaf in leaves]
            reduced = reduce_leaves(leaves, reduction, named)
        for index, gradient in zip(present, reduced, strict=True):
            gradients[index] = gradient
        return gradients


def _share(samples: int | tf.Tensor, reduction: Reduction) -> tf.Tensor:
    """Returns this rank's fraction of all samples, a float64 scalar."""
    own = tf.cast(samples, tf.float64)
    if own.shape.rank:
        raise ValueError(f"samples must be a scalar, and have the shape {own.shape}")
    (total,) = reduce([own], Collective(reduction.communicator, Label.of("gradients/samples")))
    return tf.math.divide_no_nan(own, total)


def _weighted(share: tf.Tensor, leaf: tf.Tensor) -> tf.Tensor:
    """Returns a gradient times this rank's share: its summand of the mean over all samples."""
    leaf = as_tensor(leaf, "gradients")
    if not leaf.dtype.is_floating:
        raise TypeError(f"samples weigh gradients of floats, not of {leaf.dtype.name}")
    wide = tf.cast(leaf, accumulator(leaf.dtype))
    # A mean over no samples is NaN, and must not reach the sum.
    return tf.cast(tf.math.multiply_no_nan(wide, tf.cast(share, wide.dtype)), leaf.dtype)
