"""The optimizer and the hook for programs with sessions of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradring.config import parse
from gradring.horovod.tensorflow.collectives import broadcast_global_variables
from gradring.horovod.tensorflow.gradients import (
    Gradient,
    LocalVariables,
    Options,
    reduce_gradients,
)
from gradring.tensorflow.graph import compat

_v1: Any = tf.compat.v1
_Hook: Any = _v1.train.SessionRunHook
_Optimizer: Any = _v1.train.Optimizer


class BroadcastGlobalVariablesHook(_Hook):  # type: ignore[misc]
    """A hook that gives all global variables the root's values when a session begins.

    Pass it to `tf.compat.v1.train.MonitoredTrainingSession` on every rank. Only one rank should
    restore and write checkpoints.

    Examples:
        >>> with tf.Graph().as_default():
        ...     weight = tf.compat.v1.get_variable("weight", initializer=float(hvd.rank()))
        ...     hook = hvd.BroadcastGlobalVariablesHook(root_rank=1)
        ...     # It calls hook.begin(), and hook.after_create_session() when it has variables.
        ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        ...         float(session.run(weight))
        1.0
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Makes the hook.

        Args:
            root_rank: The root.
            device: Has no effect: tensors are on CPUs.
        """
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not _v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the broadcast.

        Args:
            session: The new session.
            coord: Its `tf.train.Coordinator`; not used.
        """
        session.run(self.bcast_op)


class SessionOptimizer(_Optimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose gradients are reduced over all ranks."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        options: Options,
        passes: int,
        averages: bool,
    ) -> None:
        """Wraps an optimizer.

        Args:
            optimizer: The optimizer.
            name: Name of this optimizer; default: "Distributed" and the optimizer's class.
            use_locking: As in TensorFlow.
            options: The options of the reduction.
            passes: Number of steps whose gradients are added up before their sum is reduced and
                applied.
            averages: True to divide the sum by this number.

        Raises:
            ValueError: `passes` is below 1, or above 1 while TensorFlow executes eagerly.
        """
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._options = options
        self._local = LocalVariables()
        self._passes = parse.integer(passes, "backward_passes_per_step", minimum=1)
        self._averages = averages
        #: True if the last computed gradients complete a step; None if no gradients are added up.
        self._is_whole: tf.Tensor | None = None
        if self._passes > 1 and tf.executing_eagerly():
            raise ValueError(
                f"backward_passes_per_step={passes}: {type(optimizer).__name__} adds gradients up "
                "in a graph for sessions only; use an optimizer of tf.keras.optimizers"
            )

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._local.add(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Any]]:
        """Computes gradients as the optimizer does, and reduces them.

        Raises:
            NotImplementedError: Gradients are added up, and it was already called in this graph.
        """
        if self._is_whole is not None and self._is_whole.graph is _v1.get_default_graph():
            raise NotImplementedError(
                f"backward_passes_per_step={self._passes}: {self.get_name()} adds up the gradients "
                "of one loss in a graph; make an optimizer of its own for each loss"
            )
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if not pairs:
            return []
        gradients, variables = map(list, zip(*pairs, strict=True))
        if self._passes > 1:
            gradients = self._added_up(gradients, variables)
        else:
            gradients = self._reduced(gradients, variables)
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Applies gradients as the optimizer does, at the end of a whole step."""
        pairs = list(grads_and_vars)
        if self._is_whole is None:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step)

        def count() -> Any:
            return tf.no_op() if global_step is None else global_step.assign_add(1)

        # Gradients must be computed even if the branch does not use them.
        present = [gradient for gradient, _ in pairs if gradient is not None]
        with tf.control_dependencies(present):
            is_whole = tf.identity(self._is_whole)
        applied = tf.cond(is_whole, lambda: _after(apply()), lambda: _after(count()))
        return tf.group(applied, name=name)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the optimizer's method."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the optimizer's method."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the optimizer's method."""
        return self._optimizer.variables(*args, **kwargs)

    def _reduced(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        reduced: list[Gradient] = reduce_gradients(gradients, variables, self._options, self._local)
        return reduced

    def _added_up(self, gradients: list[Gradient], variables: list[Any]) -> list[Gradient]:
        """Returns the reduced sums at the end of a step; before it, the sums so far."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        dense = [self._dense(gradients[i], variables[i]) for i in present]
        counter = _local_variable(tf.zeros([], tf.int32), "counter")
        totals = [_local_variable(tf.zeros_like(each), "sum") for each in dense]
        number = counter.read_value()
        # The first gradients of a step replace the last step's sums.
        added = [
            tf.where(tf.equal(number, 0), gradient, total.read_value() + gradient)
            for gradient, total in zip(dense, totals, strict=True)
        ]
        with tf.control_dependencies(added):
            assigned = [
                total.assign(value, read_value=False)
                for total, value in zip(totals, added, strict=True)
            ]
            number = (number + 1) % self._passes
            assigned.append(counter.assign(number, read_value=False))
        with tf.control_dependencies(assigned):
            self._is_whole = tf.equal(number, 0)
            sums = [tf.identity(value) for value in added]
        named = [variables[i] for i in present]

        def whole() -> list[tf.Tensor]:
            reduced = self._reduced(sums, named)
            divisor = self._passes if self._averages else 1
            return [each / tf.cast(divisor, each.dtype) for each in reduced]

        results = list(gradients)
        taken = _conditional(self._is_whole, whole, lambda: list(sums))
        for i, gradient in zip(present, tf.nest.flatten(taken), strict=True):
            results[i] = gradient
        return results

    def _dense(self, gradient: Gradient, variable: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._options.sparse_as_dense:
            raise ValueError(
                f"backward_passes_per_step={self._passes}: the gradient of {variable.name} is "
                "tf.IndexedSlices, which cannot be added up; pass sparse_as_dense=True"
            )
        dense = tf.convert_to_tensor(gradient)
        dense.set_shape(variable.shape)
        return dense


def _local_variable(value: tf.Tensor, name: str) -> Any:
    """Returns a variable that `tf.compat.v1.local_variables_initializer` initializes."""
    return _v1.Variable(
        lambda: tf.zeros(value.shape, value.dtype),
        trainable=False,
        collections=[_v1.GraphKeys.LOCAL_VARIABLES],
        use_resource=True,
        name=f"horovod_{name}",
    )


def _after(operation: Any) -> tf.Tensor:
    """Returns a tensor, for branches of a conditional, that depends on the operation."""
    with tf.control_dependencies([operation]):
        return tf.identity(tf.constant(True))


def _conditional(
    condition: tf.Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]
) -> Any:
    """Calls `tf.cond` with functions as branches, also in graphs of TensorFlow 1."""
    if tf.executing_eagerly():
        return tf.cond(condition, if_true, if_false)
    return compat.cond_v2(condition, if_true, if_false)
