"""Horovod's collectives on tensors, eagerly and inside a `tf.function`.

Gradients through collectives are defined as in Horovod. gradring sums the ranks' losses; here they
are averaged, except through `allreduce` with `Sum` and through `alltoall`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.gradients.names import Label, name_of
from gradring.gradients.reduction import Collective
from gradring.group.communicator import Communicator
from gradring.horovod import basics
from gradring.horovod.process_sets import ProcessSet, communicator_of, global_process_set, place_in
from gradring.horovod.tensorflow.calls import (
    check_happens_now,
    is_for_sessions,
    require_equal_calls,
)
from gradring.horovod.tensorflow.compression import Compression, Compressor, checked
from gradring.horovod.tensorflow.reduce_ops import Average, ReduceOp, chosen, linear
from gradring.tensorflow import all_gather, all_reduce, reduce_scatter
from gradring.tensorflow import broadcast as broadcast_tensor
from gradring.tensorflow.graph.adoption import of_tensorflow
from gradring.tensorflow.graph.dtypes import as_tensor
from gradring.tensorflow.graph.own_draws import note_shared
from gradring.tensorflow.graph.rows import checked_splits, exchange_rows

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor, a variable or `tf.IndexedSlices` over all ranks.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks. For `tf.IndexedSlices`, the rows
            of all ranks are concatenated.
        average: The older form of `op`: Average or Sum.
        device_dense: Has no effect: tensors are on CPUs.
        device_sparse: Has no effect.
        compression: Compression on the wire.
        op: The reduction; default Average.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        name: Compared between ranks, and used in messages.
        process_set: The participating processes.
        ignore_name_scope: Has no effect: names are used unchanged.

    Returns:
        The reduced tensor, or `tf.IndexedSlices`.

    Examples:
        >>> hvd.allreduce(tf.constant([1.0, 2.0]) * (hvd.rank() + 1)).numpy()
        array([1.5, 3. ], dtype=float32)
        >>> int(hvd.allreduce(hvd.rank() + 1, op=hvd.Sum, name="rows"))
        3
        >>> rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]))
        >>> hvd.allreduce(rows).indices.numpy()
        array([0, 1], dtype=int32)
    """
    (reduced,) = grouped_allreduce(
        [tensor],
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name,
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces several tensors together; see `allreduce`.

    Args:
        tensors: Tensors, variables or `tf.IndexedSlices`, in the same order on all ranks.
        average: As in `allreduce`.
        device_dense: Has no effect.
        device_sparse: Has no effect.
        compression: As in `allreduce`.
        op: As in `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        process_set: As in `allreduce`.
        ignore_name_scope: Has no effect.
        name: Name of the whole group of tensors; as in `allreduce`.

    Returns:
        The reduced tensors, in this order.

    Raises:
        NotImplementedError: The op is Adasum; or, for `tf.IndexedSlices`, it is not Average or Sum,
            or a factor is given.
        TypeError: `op` is not a reduction, or `compression` is not a compressor.
        ValueError: `op` and `average` are both given.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> kernel, bias = tf.fill([2, 1], 2.0 * hvd.rank()), tf.constant([3.0])
        >>> kernel, bias = hvd.grouped_allreduce([kernel, bias], op=hvd.Sum)
        >>> kernel.numpy().tolist(), bias.numpy().tolist()
        ([[2.0], [2.0]], [6.0])
    """
    op = chosen(op, average)
    factors = prescale_factor, postscale_factor
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if sparse:
        linear(op, "tf.IndexedSlices")
        if factors != (1.0, 1.0):
            raise NotImplementedError("tf.IndexedSlices cannot be scaled; scale their values")
    label = name or "allreduce"
    results = list(tensors)
    for i in sparse:
        results[i] = _joined_slices(tensors[i], op, f"{label}/{i}", communicator_of(process_set))
    dense = [i for i in range(len(tensors)) if i not in sparse]
    reduced = reduce_dense(
        [tensors[i] for i in dense], op, label, communicator_of(process_set), compression, factors
    )
    for i, result in zip(dense, reduced, strict=True):
        results[i] = result
    return results


def reduce_dense(
    tensors: Sequence[Any],
    op: ReduceOp,
    name: str,
    communicator: Communicator,
    compression: type[Compressor] = Compression.none,
    factors: tuple[float, float] = (1.0, 1.0),
    variables: Sequence[str] | None = None,
) -> list[tf.Tensor]:
    """Reduces dense tensors together, with compression and factors before and after."""
    compression = checked(compression)
    if not tensors:
        return []
    before, after = factors
    compressed = [compression.compress(as_tensor(tensor, name)) for tensor in tensors]
    scaled = [_scaled(tensor, before) for tensor, _ in compressed]
    require_equal_calls(communicator, "allreduce", name, scaled, how=op.value, variables=variables)
    reduced = all_reduce(scaled, op.value, name, communicator, variables=variables)
    return [
        compression.decompress(_scaled(tensor, after), ctx)
        for tensor, (_, ctx) in zip(reduced, compressed, strict=True)
    ]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first dimension, whose sizes can differ.

    Args:
        tensor: A tensor of at least one dimension.
        name: Compared between ranks, and used in messages.
        ignore_name_scope: Has no effect.
        process_set: The participating processes.

    Examples:
        >>> rows = tf.fill([hvd.rank() + 1, 2], hvd.rank())  # one row, and two
        >>> hvd.allgather(rows).numpy()
        array([[0, 0],
               [1, 1],
               [1, 1]], dtype=int32)
    """
    (gathered,) = grouped_allgather([tensor], name or "allgather", process_set=process_set)
    return gathered


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Applies `allgather` to several tensors.

    Args:
        tensors: Tensors of at least one dimension, in the same order on all ranks.
        name: Name of the whole group of tensors; as in `allgather`.
        ignore_name_scope: Has no effect.
        process_set: As in `allgather`.

    Returns:
        The concatenated tensors, in this order.

    Raises:
        ValueError: A tensor is a scalar.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> labels, scores = tf.constant([hvd.rank()]), tf.constant([[0.5, 0.25]])
        >>> labels, scores = hvd.grouped_allgather([labels, scores])
        >>> labels.numpy().tolist(), scores.numpy().tolist()
        ([0, 1], [[0.5, 0.25], [0.5, 0.25]])
    """
    communicator = communicator_of(process_set)
    label = name or "grouped_allgather"
    values = [as_tensor(tensor, label) for tensor in tensors]
    require_equal_calls(communicator, "allgather", label, values, rows_differ=True)
    return [
        _scaling_gradient(
            all_gather(value, f"{label}/{i}", communicator), 1 / communicator.world_size
        )
        for i, value in enumerate(values)
    ]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Gives every rank the root's tensor.

    Args:
        tensor: A tensor of the same shape and dtype on all ranks.
        root_rank: The root's rank among all processes.
        name: Compared between ranks, and used in messages.
        ignore_name_scope: Has no effect.
        process_set: The participating processes.

    Raises:
        gradring.errors.MismatchError: The ranks' calls differ.
        ValueError: `root_rank` is not in the process set.

    Examples:
        >>> hvd.broadcast(tf.constant([1.0, 10.0 * hvd.rank()]), root_rank=1).numpy()
        array([ 1., 10.], dtype=float32)
    """
    communicator = communicator_of(process_set)
    root = place_in(process_set, root_rank)
    label = name or "broadcast"
    value = as_tensor(tensor, label)
    require_equal_calls(communicator, "broadcast", label, [value], how=f"root {root_rank}")
    return _broadcast(value, root, label, communicator)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gives the variables of every rank the root's values.

    Args:
        variables: Variables, equal in number, shapes and dtypes on all ranks.
        root_rank: As in `broadcast`.
        name: As in `broadcast`.
        process_set: As in `broadcast`.

    Returns:
        Their values.

    Examples:
        >>> weights = tf.Variable(tf.fill([2], float(hvd.rank())))
        >>> [value.numpy() for value in hvd.broadcast_([weights], root_rank=1)]
        [array([1., 1.], dtype=float32)]
        >>> weights.numpy()
        array([1., 1.], dtype=float32)
    """
    communicator = communicator_of(process_set)
    root = place_in(process_set, root_rank)
    label = name or "broadcast_"
    _gather_parts(variables, root, process_set)
    values = [as_tensor(variable, label) for variable in variables]
    require_equal_calls(communicator, "broadcast_", label, values, how=f"root {root_rank}")
    assigned = [
        variable.assign(_broadcast(value, root, f"{label}/{i}", communicator))
        for i, (variable, value) in enumerate(zip(variables, values, strict=True))
    ]
    note_shared(variables, communicator)
    if is_for_sessions():
        # Running these tensors also assigns the variables.
        return [tf.identity(value) for value in assigned]
    return [tf.convert_to_tensor(variable) for variable in variables]


def _gather_parts(variables: Sequence[Any], root: int, process_set: ProcessSet) -> None:
    """Makes variables whole of which ranks hold parts, as of an optimizer's state.

    Raises:
        gradring.errors.ConfigError: The process set has not all ranks.
    """
    done = []
    for variable in map(of_tensorflow, variables):
        if not hasattr(variable, "make_whole"):
            continue
        # A graph gathers the states of an optimizer at once. Eagerly, one may be whole already.
        if not tf.executing_eagerly() and variable.parts in done:
            continue
        done.append(variable.parts)
        if process_set.ranks is not None:
            raise ConfigError(
                f"broadcast of {name_of(variable)}: all ranks hold parts of it, and {process_set} "
                "has some of them; leave out process_set="
            )
        variable.make_whole(root)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Returns an operation that gives all global variables of a graph the root's values.

    Args:
        root_rank: The root.

    Returns:
        The operation; run it on every rank after the initialization of the variables.

    Raises:
        RuntimeError: The call is eager or in a `tf.function`, which have no global variables.

    Examples:
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     weight = tf.compat.v1.get_variable("weight", initializer=float(hvd.rank()))
        ...     make_equal = hvd.broadcast_global_variables(root_rank=1)
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     session.run(make_equal)
        ...     float(session.run(weight))
        1.0
    """
    if not is_for_sessions():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for sessions of TensorFlow 1, and does not "
            "support eager execution; use hvd.broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Gives the variables of every rank the root's values, as `broadcast_` does.

    Args:
        variables: Variables, equal in number, shapes and dtypes on all ranks.
        root_rank: As in `broadcast`.
        process_set: As in `broadcast`.
        inplace: Has no effect.

    Returns:
        The operation to run, in a graph for sessions of TensorFlow 1; else None.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        >>> model.set_weights([np.full((1, 1), hvd.rank()), np.zeros(1)])
        >>> hvd.broadcast_variables(model.variables, root_rank=1)
        >>> [weights.tolist() for weights in model.get_weights()]
        [[[1.0]], [0.0]]
    """
    values = broadcast_(variables, root_rank, "broadcast_variables", process_set)
    return tf.group(*values) if is_for_sessions() else None


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over all ranks and gives each rank its part of the rows.

    Args:
        tensor: A tensor of at least one dimension, with the same shape and dtype on all ranks. If
            the first dimension does not divide evenly, the first ranks get one row more.
        device_dense: Has no effect.
        compression: Compression on the wire.
        op: Average or Sum.
        name: Compared between ranks, and used in messages.
        process_set: The participating processes.
        ignore_name_scope: Has no effect.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.

    Examples:
        >>> rows = tf.constant([[1.0], [2.0], [3.0]]) * (hvd.rank() + 1)
        >>> hvd.reducescatter(rows, op=hvd.Sum).numpy()  # rank 1 gets [[9.]]
        array([[3.],
               [6.]], dtype=float32)
    """
    (part,) = grouped_reducescatter(
        [tensor],
        compression=compression,
        op=op,
        process_set=process_set,
        name=name or "reducescatter",
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return part


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Applies `reducescatter` to several tensors.

    Args:
        tensors: Tensors of at least one dimension, in the same order on all ranks.
        device_dense: Has no effect.
        compression: As in `reducescatter`.
        op: As in `reducescatter`.
        process_set: As in `reducescatter`.
        ignore_name_scope: Has no effect.
        name: Name of the whole group of tensors; as in `reducescatter`.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.

    Returns:
        This rank's part of each tensor, in this order.

    Raises:
        NotImplementedError: `op` is neither Average nor Sum.
        TypeError: `op` is not a reduction, or `compression` is not a compressor.
        ValueError: A tensor is a scalar.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> kernel, bias = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([5.0, 6.0])
        >>> kernel, bias = hvd.grouped_reducescatter([kernel, bias], op=hvd.Sum)
        >>> kernel.numpy().tolist(), bias.numpy().tolist()
        ([[2.0, 4.0]], [10.0])
    """
    op = linear(chosen(op, None), "reducescatter")
    communicator = communicator_of(process_set)
    label = name or "grouped_reducescatter"
    compression = checked(compression)
    compressed = [compression.compress(as_tensor(tensor, label)) for tensor in tensors]
    scaled = [_scaled(tensor, prescale_factor) for tensor, _ in compressed]
    require_equal_calls(communicator, "reducescatter", label, scaled, how=op.value)
    parts = [
        reduce_scatter(tensor, op.value, f"{label}/{i}", communicator)
        for i, tensor in enumerate(scaled)
    ]
    return [
        _scaling_gradient(
            compression.decompress(_scaled(part, postscale_factor), ctx), communicator.world_size
        )
        for part, (_, ctx) in zip(parts, compressed, strict=True)
    ]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends each rank some rows, and returns the rows received from all ranks.

    Args:
        tensor: A tensor of at least one dimension; ranks can differ in the first.
        splits: Number of rows for each rank, in rank order. Default: equal numbers.
        name: Compared between ranks, and used in messages.
        ignore_name_scope: Has no effect.
        process_set: The participating processes.

    Returns:
        The rows from all ranks, in rank order. If `splits` are given, also the number of rows from
        each rank.

    Raises:
        tf.errors.InvalidArgumentError: The sum of the splits is not the number of rows; a split is
            negative; or without splits, the rows do not divide evenly.
        TypeError: The splits are not integers.
        ValueError: The tensor is a scalar; or splits known at the call do not fit its rows.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> x = tf.constant([0, 1, 2]) + 10 * hvd.rank()
        >>> hvd.alltoall(x, splits=[1, 2])  # one row to rank 0, two to rank 1
        (<tf.Tensor: shape=(2,), dtype=int32, numpy=array([ 0, 10], dtype=int32)>,
         <tf.Tensor: shape=(2,), dtype=int32, numpy=array([1, 1], dtype=int32)>)
        >>> hvd.alltoall(x[:2]).numpy()
        array([ 0, 10], dtype=int32)
    """
    communicator = communicator_of(process_set)
    label = name or "alltoall"
    value = as_tensor(tensor, label)
    if value.shape.rank == 0:
        raise ValueError(f"{label}: a scalar has no rows; reshape it to [1]")
    given = _equal_parts(value, communicator.world_size, label) if splits is None else splits
    sent = checked_splits(given, value, communicator.world_size, label)
    require_equal_calls(communicator, "alltoall", label, [value], rows_differ=True)
    rows, received = exchange_rows(value, sent, Collective(communicator, Label.of(label)))
    if splits is None:
        return rows
    return rows, tf.cast(received, tf.convert_to_tensor(splits).dtype)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it; cannot be used inside a `tf.function`.

    Args:
        process_set: The participating processes.

    Raises:
        RuntimeError: The call is inside a `tf.function`.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> if hvd.rank() == 1:
        ...     np.save("data.npy", np.arange(3))
        >>> hvd.barrier()  # the file is there
        >>> np.load("data.npy")
        array([0, 1, 2])
    """
    check_happens_now("barrier")
    communicator = communicator_of(process_set)
    require_equal_calls(communicator, "barrier", "", [], happens_now=True)
    communicator.barrier()


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns `rank` as an int32 tensor.

    Args:
        name: Name of the tensor.
    """
    return tf.constant(basics.rank(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns `local_rank` as an int32 tensor.

    Args:
        name: Name of the tensor.
    """
    return tf.constant(basics.local_rank(), tf.int32, name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns `size` as an int32 tensor.

    Args:
        process_set_id: Must be 0, for all processes.
        name: Name of the tensor.

    Raises:
        NotImplementedError: Another process set is given.
    """
    if process_set_id != 0:
        raise NotImplementedError("size_op: of a process set use its size()")
    return tf.constant(basics.size(), tf.int32, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns `local_size` as an int32 tensor.

    Args:
        name: Name of the tensor.
    """
    return tf.constant(basics.local_size(), tf.int32, name=name)


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiplies in float64 for integers, and in at least float32 for floats."""
    if factor == 1.0:
        return tensor
    wide = tf.float64 if tensor.dtype.is_integer else tensor.dtype
    if wide.size < tf.float32.size:
        wide = tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _joined_slices(
    slices: tf.IndexedSlices, op: ReduceOp, label: str, communicator: Communicator
) -> tf.IndexedSlices:
    parts = [slices.values, slices.indices]
    require_equal_calls(
        communicator, "allreduce of rows", label, parts, how=op.value, rows_differ=True
    )
    values = all_gather(slices.values, f"{label}/values", communicator)
    if op is Average:
        values /= tf.cast(communicator.world_size, values.dtype)
    indices = all_gather(slices.indices, f"{label}/indices", communicator)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _scaling_gradient(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Returns the tensor unchanged; multiplies gradients through it by `factor`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scaling(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: _scaled(tf.cast(upstream, x.dtype), factor)

    return scaling(tensor)


def _broadcast(value: tf.Tensor, root: int, label: str, communicator: Communicator) -> tf.Tensor:
    sent = broadcast_tensor(value, root, label, communicator)
    return _scaling_gradient(sent, 1 / communicator.world_size)


def _equal_parts(value: tf.Tensor, ranks: int, label: str) -> tf.Tensor:
    """Returns equal numbers of rows for all ranks."""
    rows = tf.shape(value, tf.int64)[0]
    check = tf.debugging.assert_equal(
        rows % ranks, tf.zeros([], tf.int64), f"{label}: the rows have no {ranks} equal parts"
    )
    # In a graph, this check runs before rows are sent.
    with tf.control_dependencies([] if check is None else [check]):
        return tf.fill([ranks], rows // ranks)
