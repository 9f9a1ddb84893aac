"""Collectives on TensorFlow tensors, eagerly and inside a `tf.function`.

A reduction creates the Starts of all its buckets before its first Wait, so that communication
overlaps with the remaining computation of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import gradring
from gradring.errors import ConfigError
from gradring.gradients import buckets, checks
from gradring.gradients.names import Label, Names, name_of, without_counters
from gradring.gradients.reduction import Collective, Reduction
from gradring.group.arrays import ReduceOp, check_root
from gradring.group.communicator import Communicator, open_groups
from gradring.tensorflow.graph import own_draws, replica_step
from gradring.tensorflow.graph.adoption import communicator_of, of_tensorflow
from gradring.tensorflow.graph.dtypes import as_native, as_native_bits, as_tensor, with_dtype
from gradring.tensorflow.graph.reduction import Variable, reduce_leaves
from gradring.tensorflow.graph.rows import checked_splits, exchange_rows, gather_rows, row_counts
from gradring.tensorflow.graph.start_wait import (
    own_rows,
    start,
    start_all_to_all,
    start_reduce_scatter,
    wait,
)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def all_reduce(
    tensors: Any,
    op: ReduceOp = "sum",
    name: str | None = None,
    communicator: Communicator | None = None,
    *,
    variables: Sequence[Variable | str] | None = None,
    bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
    embeddings: checks.Embeddings = "rows",
) -> Any:
    """Reduces tensors over all ranks; every rank gets the same bits.

    Every rank must call it with the same structure, shapes, dtypes, `op` and `name`, and in the
    same order among its other collectives. Gradients flow through "sum" and "mean".

    Args:
        tensors: A tensor, or a nest of tensors, of any shapes; float32, float64, float16, bfloat16,
            int8, int16, int32, int64, uint8, uint16 or uint32. `tf.IndexedSlices` are allowed for
            "sum" and "mean", see `embeddings`. Pass gradients in the order of their variables: the
            last one starts first, because a backward pass produces it first.
        op: "sum" (default), "mean", "min", "max" or "product". The integer mean is an integer,
            rounded towards zero.
        name: Name that messages show and ranks compare; default "all_reduce".
        communicator: Group to reduce over. Default: the group of the current strategy, or else the
            only open group, or else a new group from `gradring.init()`.
        variables: The variables of these gradients, or names, in the order of the flattened
            `tensors`. Messages show the names. Ranks compare them, without the counters that Keras
            adds.
        bucket_bytes: Largest size in bytes of tensors that travel together; default 16 MiB.
        embeddings: Treatment of `tf.IndexedSlices`, the same on every rank. "rows" (default): the
            result has the rows of all ranks, in rank order; a mean divides each row. "sum": the
            result has one row for each index, the sum of its rows; gradring sends the form with
            the fewest bytes.

    Returns:
        The reduced tensors, in the structure of `tensors`, with their shapes and dtypes.

    Raises:
        TypeError: A value cannot be sent as a tensor, such as None or a `tf.RaggedTensor`, or its
            dtype cannot be reduced. Nothing is sent then.
        gradring.errors.ConfigError: `embeddings` is neither "rows" nor "sum".
        ValueError: `op` is unknown, or does not exist for `tf.IndexedSlices`; or the number of
            `variables` differs from the number of tensors; or `bucket_bytes` is not above 0.
        tf.errors.AbortedError: The collective failed; the message names the rank to blame. The
            exception is one of `gradring.errors` as well, also from a `tf.function`.
        tf.errors.DeadlineExceededError: The communicator's timeout has passed. The exception is one
            of `gradring.errors` as well.

    Examples:
        >>> gradring.tensorflow.all_reduce(tf.fill([3], rank + 1.0)).numpy()
        array([3., 3., 3.], dtype=float32)
        >>> own = {"loss": tf.constant(0.5 + rank), "seen": tf.constant(100 * rank)}
        >>> mean = gradring.tensorflow.all_reduce(own, "mean")
        >>> float(mean["loss"]), int(mean["seen"])
        (1.0, 50)
    """
    leaves = tf.nest.flatten(tensors)
    names = Names.of_variables(name or "all_reduce", leaves, variables)
    comm = group_of(communicator)
    reduction = Reduction(
        comm,
        names,
        op,
        bucket_bytes,
        embeddings=embeddings,
        of_own_samples=variables is not None,
    )
    return tf.nest.pack_sequence_as(tensors, reduce_leaves(leaves, reduction, variables))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast(
    value: tf.Tensor,
    root: int = 0,
    name: str | None = None,
    communicator: Communicator | None = None,
) -> tf.Tensor:
    """Gives every rank the root's tensor.

    The gradient on the root is the sum of all ranks' gradients; it is zero on all other ranks.

    Args:
        value: A tensor; the same shape and dtype on every rank. Any dtype of fixed width.
        root: The rank whose tensor all ranks get; default 0.
        name: Name that messages show and ranks compare; default "broadcast".
        communicator: As for `all_reduce`.

    Returns:
        A tensor like `value`.

    Raises:
        TypeError: `value` is no tensor, or its dtype has no fixed width, such as string. Nothing is
            sent then.
        ValueError: `root` is not a rank.
        tf.errors.AbortedError: As for `all_reduce`.
        tf.errors.DeadlineExceededError: As for `all_reduce`.

    Examples:
        >>> x = tf.constant([1.0, 2.0]) + 10.0 * rank
        >>> gradring.tensorflow.broadcast(x, root=1).numpy()
        array([11., 12.], dtype=float32)
    """
    return broadcast_labelled(value, root, Label.of(name or "broadcast"), communicator)


def broadcast_labelled(
    value: tf.Tensor, root: int, label: Label, communicator: Communicator | None
) -> tf.Tensor:
    """Performs `broadcast` with a label whose shown name differs from the name ranks compare."""
    comm = group_of(communicator)
    check_root(root, comm.world_size, label.shown)
    value = as_tensor(value, label.shown)
    encoded, decode = as_native_bits(value, label.shown)
    started = start([encoded], with_dtype(Collective(comm, label), value), root)
    return decode(wait([started])[0][0])


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast_variables(
    variables: Variable | Sequence[Variable],
    root: int = 0,
    communicator: Communicator | None = None,
) -> None:
    """Assigns the root's values to the variables of every rank.

    Args:
        variables: A `tf.Variable` or a variable of Keras, or a list of them, the same on every
            rank; of any shapes, and any dtype of fixed width.
        root: The rank whose values all ranks get; default 0.
        communicator: As for `all_reduce`.

    Raises:
        TypeError: A value is no variable, or as for `broadcast`.
        ValueError: `root` is not a rank.
        tf.errors.AbortedError: As for `all_reduce`.
        tf.errors.DeadlineExceededError: As for `all_reduce`.

    Examples:
        >>> weights, bias = tf.Variable([1.0 + rank] * 2), tf.Variable(10.0 * rank)
        >>> gradring.tensorflow.broadcast_variables([weights, bias], root=1)
        >>> weights.numpy(), float(bias)
        (array([2., 2.], dtype=float32), 10.0)
    """
    variables = [variables] if hasattr(variables, "assign") else list(variables)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                f"broadcast_variables: a {type(variable).__name__} is no variable; "
                "pass a list of tf.Variable or Keras variables"
            )
    # Under some update rules, ranks hold parts of an optimizer's variables.
    for variable in map(of_tensorflow, variables):
        if hasattr(variable, "make_whole"):
            variable.make_whole()
    compared = without_counters([name_of(variable) for variable in variables])
    for index, variable in enumerate(variables):
        value = tf.convert_to_tensor(variable)
        label = Label(f"{index}/{name_of(variable)}", f"{index}/{compared[index]}")
        variable.assign(broadcast_labelled(value, root, label, communicator))
    own_draws.note_shared(variables, group_of(communicator))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def all_gather(
    value: tf.Tensor, name: str | None = None, communicator: Communicator | None = None
) -> tf.Tensor:
    """Concatenates every rank's tensor along the first dimension, in rank order.

    Args:
        value: A tensor of at least one dimension; ranks may differ in the size of the first. Any
            dtype of fixed width.
        name: Name that messages show and ranks compare; default "all_gather".
        communicator: As for `all_reduce`.

    Returns:
        A tensor of shape `[sum of the first dimensions, ...]`. Gradients flow through it.

    Raises:
        TypeError: `value` is no tensor, or its dtype has no fixed width, such as string. Nothing is
            sent then.
        ValueError: `value` is a scalar.
        tf.errors.AbortedError: As for `all_reduce`.
        tf.errors.DeadlineExceededError: As for `all_reduce`.

    Examples:
        >>> rows = tf.fill([rank + 1, 2], rank)  # rank 0 has one row, rank 1 has two
        >>> gradring.tensorflow.all_gather(rows).numpy()
        array([[0, 0],
               [1, 1],
               [1, 1]], dtype=int32)
    """
    label, comm, value = _with_rows(value, name or "all_gather", communicator, "gather")
    as_native_bits(value, label.shown)  # refuses unsendable dtypes before the counts travel
    gathering = Collective(comm, label)
    (counts,) = row_counts([value], gathering)
    (gathered,) = gather_rows([value], [counts], [gathering])
    return gathered


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def reduce_scatter(
    value: tf.Tensor,
    op: ReduceOp = "sum",
    name: str | None = None,
    communicator: Communicator | None = None,
) -> tf.Tensor:
    """Reduces a tensor over all ranks and gives each rank its part of the rows.

    Args:
        value: A tensor of at least one dimension; the same shape and dtype on every rank. Any dtype
            that `all_reduce` takes.
        op: As for `all_reduce`. Gradients flow through "sum" and "mean".
        name: Name that messages show and ranks compare; default "reduce_scatter".
        communicator: As for `all_reduce`.

    Returns:
        Part `rank` of `numpy.array_split(reduced, world_size)`. If the first dimension does not
        divide evenly, the first parts have one row more.

    Raises:
        TypeError: As for `all_reduce`.
        ValueError: `op` is unknown, or `value` is a scalar.
        tf.errors.AbortedError: As for `all_reduce`.
        tf.errors.DeadlineExceededError: As for `all_reduce`.

    Examples:
        >>> x = tf.constant([1.0, 2.0, 3.0]) * (rank + 1)
        >>> gradring.tensorflow.reduce_scatter(x).numpy()  # of [3, 6, 9], rank 1 has the last
        array([3., 6.], dtype=float32)
    """
    label, comm, value = _with_rows(value, name or "reduce_scatter", communicator, "divide")
    checks.check_op(op)
    native, decode = as_native(value, label.shown)
    started = start_reduce_scatter(native, with_dtype(Collective(comm, label, op), value))
    return decode(own_rows(wait([started])[0][0], comm))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def all_to_all(
    value: tf.Tensor,
    name: str | None = None,
    communicator: Communicator | None = None,
    *,
    splits: Any = None,
) -> Any:
    """Sends every rank its part of a tensor, and returns the parts received from all ranks.

    If `splits` are given, each rank first sends every other rank the number of rows, 8 bytes. After
    that, only the rows themselves travel (MPI's ``Alltoallv``).

    Args:
        value: A tensor of the same shape and dtype on every rank, of any dtype of fixed width. Its
            first dimension is divided among the ranks: part r is for rank r. If `splits` are given,
            ranks can differ in the first dimension.
        name: Name that messages show and ranks compare; default "all_to_all".
        communicator: As for `all_reduce`.
        splits: Number of rows for each rank, in rank order: integers of at least 0, of shape
            `[world_size]`, that add up to the first dimension. Either all ranks pass splits, or
            none. Default: equal parts.

    Returns:
        A tensor like `value`, whose part r comes from rank r. If `splits` are given, a pair: the
        rows from all ranks, in rank order, and the number of rows from each rank, as int64 of shape
        `[world_size]`. Gradients flow through it: the gradient of a row goes back to the rank that
        sent the row.

    Raises:
        TypeError: `value` is no tensor, or its dtype has no fixed width, such as string; or
            `splits` are no integers. Nothing is sent then.
        ValueError: `value` is a scalar, or its first dimension is known and does not divide evenly,
            or `splits` do not add up to it. Nothing is sent then. The error for `splits` is also a
            `tf.errors.InvalidArgumentError`. A graph that learns `splits` only when it runs raises
            a plain `tf.errors.InvalidArgumentError`.
        gradring.errors.ConfigError: The group has more than 64 ranks and ``transport="shm"``. Or a
            running graph finds that the first dimension does not divide evenly. Or a rank has no
            memory for the rows from the others.
        tf.errors.AbortedError: As for `all_reduce`.
        tf.errors.DeadlineExceededError: As for `all_reduce`.

    Examples:
        >>> x = tf.constant([1, 2]) + 10 * rank
        >>> gradring.tensorflow.all_to_all(x).numpy()  # rank 1 has [2, 12]
        array([ 1, 11], dtype=int32)
        >>> x = tf.constant([1, 2, 3]) + 10 * rank
        >>> rows, counts = gradring.tensorflow.all_to_all(x, splits=[2, 1])
        >>> rows.numpy(), counts.numpy()  # rank 1 has [3, 13], one row from each
        (array([ 1,  2, 11, 12], dtype=int32), array([2, 2]))
    """
    label, comm, value = _with_rows(value, name or "all_to_all", communicator, "divide")
    if splits is not None:
        sent = checked_splits(splits, value, comm.world_size, label.shown)
        return exchange_rows(value, sent, Collective(comm, label))
    if value.shape.rank and value.shape[0] is not None and value.shape[0] % comm.world_size:
        raise ValueError(
            f"{label.shown}: a first dimension of {value.shape[0]} has no {comm.world_size} equal "
            "parts, one for each rank; pad the tensor, or reshape it"
        )
    encoded, decode = as_native_bits(value, label.shown)
    exchange = with_dtype(Collective(comm, label), value)
    ((_, received),) = wait([start_all_to_all(encoded, exchange)])
    return decode(received)


def _with_rows(
    value: Any, name: str, communicator: Communicator | None, to: str
) -> tuple[Label, Communicator, tf.Tensor]:
    """Returns the label of a collective on rows, its group, and the value as a tensor.

    Raises:
        ValueError: The value is a scalar.
    """
    comm = group_of(communicator)
    value = as_tensor(value, name)
    if value.shape.rank == 0:
        raise ValueError(f"{name}: a scalar has no dimension to {to} along; reshape it to [1]")
    # A program can reduce its gradients by any of these collectives, packed into one tensor.
    replica_step.current().reductions.note_packed(value)
    return Label.of(name), comm, value


def group_of(communicator: Communicator | None) -> Communicator:
    """Returns the communicator that was passed to a call, or the current one.

    Raises:
        gradring.errors.ConfigError: The argument is no communicator, or as for
            `current_communicator`.
        gradring.errors.RendezvousError: As for `current_communicator`.
    """
    checks.check_communicator(communicator)
    return communicator or current_communicator()


def current_communicator() -> Communicator:
    """Returns the communicator of the current strategy, or the only open one, or a new one.

    Raises:
        gradring.errors.ConfigError: Several are open.
        gradring.errors.RendezvousError: None is open, and the group could not be formed.
    """
    if tf.distribute.has_strategy():
        communicator = communicator_of(tf.distribute.get_strategy())
        if communicator is not None:
            return communicator
    candidates = open_groups.unnamed()
    if len(candidates) > 1:
        raise ConfigError(
            f"{len(candidates)} communicators are open in this process of rank "
            f"{candidates[0].rank} on {candidates[0].host}; pass one as communicator="
        )
    if not candidates:
        candidates = [join_as_guest()]
        open_groups.keep(candidates[0])
    return candidates[0]


def join_as_guest(**arguments: Any) -> Communicator:
    """Joins a group for a strategy or an op, unless this process is in it.

    Args:
        **arguments: Arguments of `gradring.init`.

    Returns:
        The group's communicator. The guest need not close it if other code has joined the group.
    """
    before = list(open_groups)
    communicator = gradring.init(**arguments)
    if communicator in before:
        # Other code joined before: this gives back the use that `init` has just counted.
        communicator.close()
    return communicator
