"""tf.distribute's cross-device operations, carried out by gradring."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.gradients.checks import CheckGradients, Embeddings
from gradring.gradients.names import Names
from gradring.gradients.reduction import Reduction
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat, replica_step, session_order
from gradring.tensorflow.graph.adoption import is_given
from gradring.tensorflow.graph.dtypes import as_tensor, map_values
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.ops import all_gather
from gradring.tensorflow.graph.reduction import Leaf, reduce_leaves, with_known_shapes
from gradring.tensorflow.graph.sparse import with_each_index_once
from gradring.tensorflow.seams.table import overrides


def gradients_of(
    variables: Sequence[tf.Variable], among: Sequence[tf.Variable] = ()
) -> AbstractContextManager[None]:
    """Names reductions of as many tensors after these variables, while the block runs.

    Optimizers need it if they hand gradients to `tf.distribute` without their variables. `among`
    are all variables of the optimizer, including those without a gradient.
    """
    return replica_step.holding(gradients_of=replica_step.Gradients(list(variables), list(among)))


def current_variables(count: int) -> replica_step.Gradients | None:
    """Returns the arguments of the enclosing `gradients_of` if it names `count` variables."""
    given = replica_step.current().gradients_of
    return given if given is not None and len(given.variables) == count else None


def alone() -> AbstractContextManager[None]:
    """Makes reductions return this rank's own sums, while the block runs.

    One rank can then act without the others. For example, an assignment to an `ON_READ` variable,
    whose parts the ranks hold, reads the variable back, and that would wait for all ranks.
    """
    return replica_step.holding(is_alone=True)


@overrides(
    compat.CollectiveAllReduce, "_all_reduce", "_all_reduce_per_replica_values", "_batch_all_gather"
)
class RingCrossDeviceOps(compat.CollectiveAllReduce):  # type: ignore[misc]
    """Reduces and gathers over the local devices first, then over the ranks.

    Tensors of one reduction travel in as few buckets as possible. The base class still chooses
    destinations and skips groups of one replica.
    """

    def __init__(
        self,
        communicator: Communicator,
        devices: Sequence[str],
        bucket_bytes: int,
        check_gradients: CheckGradients | None = None,
        embeddings: Embeddings = "rows",
    ) -> None:
        """Makes the operations; nothing is sent yet.

        Args:
            communicator: A `gradring.Communicator`.
            devices: The local devices that hold one replica each.
            bucket_bytes: Largest size of a bucket in bytes.
            check_gradients: Reaction to gradients that are not finite: "warn", "raise" or None.
            embeddings: Treatment of rows of equal index: "rows" keeps all, "sum" adds them up.
        """
        # The constructor of the direct parent would make TensorFlow's launchers of collectives.
        compat.CrossDeviceOps.__init__(self)
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._check_gradients = check_gradients
        self._embeddings: Embeddings = embeddings
        self._devices = tuple(compat.canonical_device(device) for device in devices)
        self._host = compat.host_of(self._devices[0])
        self._options = tf.distribute.experimental.CommunicationOptions()
        self._canonicalize_devices = True
        self._lock = threading.Lock()
        self._launchers: list[Any] = []

    @property
    def _group_size(self) -> int:
        return self._communicator.world_size * len(self._devices)

    def reduce_local(self, reduce_op: tf.distribute.ReduceOp, values: Sequence[Leaf]) -> list[Leaf]:
        """Reduces one tensor or `tf.IndexedSlices` per entry over the ranks.

        Args:
            reduce_op: `tf.distribute.ReduceOp`.
            values: This rank's sums over its local devices.

        Returns:
            The results, in order. MEAN divides by the number of replicas. The mean of integers is
            float64, as with TensorFlow's own strategies.

        Raises:
            gradring.errors.ConfigError: An optimizer has already reduced these gradients.
        """
        if replica_step.current().is_alone:
            return list(self.own(values))
        session_order.refuse("gradring's strategy")
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        fused = is_mean and len(self._devices) == 1 and all(v.dtype.is_floating for v in values)
        known = current_variables(len(values))
        if known is not None and replica_step.current().has_sums:
            raise ConfigError(
                f"rank {self._communicator.rank} of {self._communicator.host}: gradients that "
                "were reduced to be clipped are reduced again; install a version of Keras that "
                "`gradring env` names as tried, or leave out clipping",
                rank=self._communicator.rank,
                host=self._communicator.host,
            )
        if known is not None:
            with_known_shapes(values, known.variables)
        name = reduce_op.name.lower()
        reduction = Reduction(
            self._communicator,
            _names(name, values, known),
            "mean" if fused else "sum",
            self._bucket_bytes,
            # Only gradients come with variables; a loss may be infinite or NaN.
            None if known is None else self._check_gradients,
            self._embeddings,
            # The batches of a given program are always divided.
            of_own_samples=known is not None and not is_given(tf.distribute.get_strategy()),
        )
        reduced = reduce_leaves(values, reduction, known and known.variables)
        if is_mean and not fused:
            reduced = [map_values(lambda sum: sum / self._group_size, each) for each in reduced]
        return list(reduced)

    def own(self, value: Any) -> Any:
        """Returns the reduction of a nest of values without those of other ranks."""
        if self._embeddings == "rows":
            return value
        return tf.nest.map_structure(with_each_index_once, value)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        """Reduces a nest of values in a replica context with one local device."""
        del replica_id, options
        leaves = [_tensor(leaf) for leaf in tf.nest.flatten(value)]
        return tf.nest.pack_sequence_as(value, self.reduce_local(reduce_op, leaves))

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any
    ) -> Any:
        """Reduces gradients under the names of their variables; see `tf.distribute.CrossDeviceOps`.

        An optimizer passes the variables as the destinations of the gradients.
        """
        destinations = [destination for _, destination in value_destination_pairs]
        are_variables = all(hasattr(destination, "assign") for destination in destinations)
        with gradients_of(destinations) if are_variables else nullcontext():
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def _all_reduce_per_replica_values(
        self, reduce_op: Any, per_replica_values: Sequence[Any], options: Any
    ) -> list[Any]:
        del options
        with tf.device(self._host):
            local = [_sum([_tensor(v) for v in value.values]) for value in per_replica_values]
            reduced = self.reduce_local(reduce_op, local)
        return [self._mirrored(value) for value in reduced]

    def _batch_all_gather(
        self, per_replica_values: Sequence[Any], axis: Any, options: Any
    ) -> list[Any]:
        del options
        with tf.device(self._host):
            gathered = [
                self._gathered([_tensor(v) for v in value.values], axis)
                for value in per_replica_values
            ]
        return [self._mirrored(value) for value in gathered]

    def _gathered(self, values: Sequence[tf.Tensor], axis: int | tf.Tensor) -> tf.Tensor:
        static, dimensions = tf.get_static_value(axis), values[0].shape.rank
        if None not in (static, dimensions) and not -dimensions <= static < dimensions:
            raise ValueError(
                f"gather: axis={static} on rank {self._communicator.rank} is no dimension of a "
                f"tensor of shape {values[0].shape}; reshape the tensor, or choose another axis"
            )
        session_order.refuse("gradring's strategy")
        local = tf.concat(values, axis)
        if static == 0:
            return all_gather(local, "gather", self._communicator)
        # The engine gathers along the first dimension.
        rank = tf.rank(local)
        axis = tf.where(axis < 0, axis + rank, axis)
        others = tf.boolean_mask(tf.range(rank), tf.range(rank) != axis)
        to_front = tf.concat([[axis], others], 0)
        gathered = all_gather(tf.transpose(local, to_front), "gather", self._communicator)
        return tf.transpose(gathered, tf.math.invert_permutation(to_front))

    def _mirrored(self, value: Leaf) -> tf.distribute.DistributedValues:
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(value if value.device == device else _identity(value))
        return compat.regroup(tuple(copies), wrap_class=compat.Mirrored)

    def __deepcopy__(self, memo: Any) -> RingCrossDeviceOps:
        return self


def _tensor(value: Any) -> Leaf:
    return value if isinstance(value, tf.IndexedSlices) else as_tensor(value, "reduce")


def _names(name: str, tensors: Sequence[Leaf], known: replica_step.Gradients | None) -> Names:
    with falls_back("the names of gradients in messages", "messages have their numbers"):
        if known is None:
            return _names_of_ops(name, tensors)
        return Names.of_variables(name, tensors, *known)
    return Names.of_variables(name, tensors, None)


def _names_of_ops(name: str, tensors: Sequence[Leaf]) -> Names:
    """Names tensors after the ops that make them; messages show these names, ranks ignore them."""
    return Names(name, [_op_name(tensor) for tensor in tensors], [""] * len(tensors))


def _op_name(tensor: Leaf) -> str:
    """Returns the name of the op that makes the tensor; empty for eager tensors."""
    values = getattr(tensor, "values", tensor)
    try:
        name = str(values.name)
    except (AttributeError, NotImplementedError):
        return ""
    return name.removeprefix("gradient_tape/").removesuffix(":0")


def _identity(value: Leaf) -> Leaf:
    return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _sum(values: Sequence[Leaf]) -> Leaf:
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], 0),
            tf.concat([value.indices for value in values], 0),
            values[0].dense_shape,
        )
    return tf.add_n(values)
