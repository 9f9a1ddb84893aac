"""Optimizers of Keras that reduce gradients over all ranks before they apply them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from gradring.config import parse
from gradring.horovod.process_sets import ProcessSet, global_process_set
from gradring.horovod.tensorflow.calls import is_for_sessions
from gradring.horovod.tensorflow.collectives import allreduce
from gradring.horovod.tensorflow.compression import Compression, Compressor
from gradring.horovod.tensorflow.gradients import (
    Gradient,
    LocalVariables,
    Options,
    reduce_gradients,
)
from gradring.horovod.tensorflow.reduce_ops import Average, ReduceOp, Sum
from gradring.horovod.tensorflow.sessions import SessionOptimizer
from gradring.horovod.tensorflow.sharded_optimizer import (
    ALL_REDUCE,
    SHARDED,
    HoldingParts,
    check_rule,
    make_rule,
)
from gradring.tensorflow.keras import compat_keras
from gradring.tensorflow.rules.updates import trained_by
from gradring.tensorflow.seams import keras_names
from gradring.updates import Rule


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    update: Rule = ALL_REDUCE,
) -> Any:
    """Returns a copy of an optimizer that reduces gradients over all ranks.

    Optimizers of Keras 3 reduce in `apply` and `apply_gradients`. Those of `tf_keras` reduce when
    they compute gradients, as in Horovod: in `minimize`, and so in `fit`. In custom loops, use
    `DistributedGradientTape` and the original optimizer. Optimizers of TensorFlow 1, such as
    `tf.compat.v1.train.AdamOptimizer`, reduce in `compute_gradients`, and so in `minimize`.

    The new class has the name of the optimizer's class, so that saved models load without this
    package. An optimizer of TensorFlow 1 is wrapped instead.

    Args:
        optimizer: An optimizer of Keras 3, `tf_keras` or TensorFlow 1. A Keras copy has new
            variables.
        name: Name, for TensorFlow 1 only.
        use_locking: As in TensorFlow 1; no effect for Keras.
        device_dense: Has no effect: tensors are on CPUs.
        device_sparse: Has no effect.
        compression: Compression on the wire.
        sparse_as_dense: Makes `tf.IndexedSlices` dense before the reduction.
        backward_passes_per_step: Number of steps whose gradients are added up before their sum is
            reduced and applied.
        op: Average or Sum.
        gradient_predivide_factor: Divisor before the sum of an average, and factor after it.
        average_aggregated_gradients: Divides the sum by `backward_passes_per_step`.
        num_groups: The older form of `groups`.
        groups: Has no effect: gradients are reduced in buckets of bytes.
        process_set: The participating processes.
        scale_local_gradients: Divides the gradients of local variables by the number of ranks.
        update: `gradring.updates.AllReduce()`, or `gradring.updates.Sharded()` for an optimizer of
            Keras 3 after `hvd.init()`. Under `Sharded()`, each rank holds its part of the
            optimizer's state. All ranks must have equal weights before the first step.

    Raises:
        gradring.errors.ConfigError: `update` is another rule. Or it is `Sharded()`, and the
            optimizer is one that contains others, or `process_set` or `compression` is given.
        NotImplementedError: The op is neither Average nor Sum. Or `optimizer` is not one of Keras
            or TensorFlow 1, or one of Keras in a graph for sessions. Or it does not support
            `update`.
        TypeError: `compression` is not a compressor.
        ValueError: A factor is given for a sum, `groups` is invalid, `backward_passes_per_step` is
            below 1, or the optimizer is already distributed.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.layers.Input((1,)), layer])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> x = np.full((4, 1), hvd.rank() + 1.0)
        >>> history = model.fit(x, 5 * x, verbose=0)  # gradients -10 and -40
        >>> model.get_weights()
        [array([[2.5]], dtype=float32)]
        >>> from gradring import updates
        >>> sgd, weight = keras.optimizers.SGD(1.0, momentum=0.5), tf.Variable(tf.zeros([32]))
        >>> divided = hvd.DistributedOptimizer(sgd, update=updates.Sharded())
        >>> divided.build([weight])
        >>> divided.apply([tf.fill([32], hvd.rank() + 1.0)])
        >>> weight[0].numpy().item(), divided.momentums[0].numpy().shape
        (-1.5, (16,))
    """
    options, passes = Options.of(locals()), backward_passes_per_step
    check_rule(optimizer, update, options)
    if isinstance(optimizer, SessionOptimizer):
        raise ValueError(f"DistributedOptimizer: {optimizer.get_name()} is distributed already")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return SessionOptimizer(
            optimizer, name, use_locking, options, passes, average_aggregated_gradients
        )
    kind = _class_of(optimizer, options, passes, average_aggregated_gradients, update)
    return kind.from_config(optimizer.get_config())


def distribute(model: Any, options: Options, update: Rule) -> None:
    """Makes the optimizer of a model a distributed one, with its variables."""
    optimizer = model.optimizer
    check_rule(getattr(optimizer, "inner_optimizer", optimizer), update, options)
    if update == SHARDED:
        _divide(model, options)
        return
    object.__setattr__(optimizer, "__class__", _class_of(optimizer, options, 1, False))
    optimizer._begin_reducing()


def _divide(model: Any, options: Options) -> None:
    """Makes the optimizer of a model one that holds its part of the loaded variables."""
    outer = model.optimizer
    optimizer = getattr(outer, "inner_optimizer", outer)
    kind = _class_of(optimizer, options, 1, False, SHARDED)
    was_built, trained, loaded = optimizer.built, trained_by(optimizer), optimizer.variables
    attributes = vars(kind.from_config(optimizer.get_config()))
    # Keras refers to the optimizer in several places, and would keep the whole state of another.
    vars(optimizer).clear()
    vars(optimizer).update(attributes)
    object.__setattr__(optimizer, "__class__", kind)
    optimizer._begin_reducing()
    # A file from before the first step has no state.
    if was_built:
        optimizer.build(trained)
    for variable, value in zip(optimizer.variables, loaded, strict=True):
        variable.assign(tf.convert_to_tensor(value))


def forget_sums() -> None:
    """Drops the accumulated gradients of all optimizers, whose steps are unfinished."""
    for sums in list(_all_sums):
        sums.forget()


def _class_of(
    optimizer: Any, options: Options, passes: int, averages: bool, update: Rule = ALL_REDUCE
) -> Any:
    passes = parse.integer(passes, "backward_passes_per_step", minimum=1)
    kind = type(optimizer)
    if is_for_sessions():
        raise NotImplementedError(
            f"DistributedOptimizer: {kind.__name__} of Keras would not reduce in a graph for "
            "sessions; use one of tf.compat.v1.train, or do not disable eager execution"
        )
    if not hasattr(kind, "from_config"):
        raise NotImplementedError(
            f"DistributedOptimizer: {kind.__name__} is no optimizer of Keras or TensorFlow 1; use "
            "one of tf.keras.optimizers, or DistributedGradientTape"
        )
    if isinstance(optimizer, _Reducing):
        raise ValueError(f"DistributedOptimizer: this {kind.__name__} is distributed already")
    base: type[_Reducing] = _ReducingWhenComputed
    if hasattr(kind, "apply"):
        base = _ReducingWhenApplied
        _skip_alike()
    members = {
        "__module__": kind.__module__,
        "_options": options,
        "_passes": passes,
        "_averages": averages,
    }
    if update == SHARDED:
        base = _ReducingParts
        members["_rule"] = make_rule(options)
    return type(kind.__name__, (base, kind), members)


@functools.cache
def _skip_alike() -> None:
    """Makes ranks skip steps together under a `LossScaleOptimizer`, which float16 training uses."""
    compat_keras.skip_alike(_ReducingWhenApplied, _added_up)


def _added_up(optimizer: _Reducing, own: tf.Tensor) -> tf.Tensor:
    ranks = optimizer._options.process_set
    return allreduce(own, op=Sum, name="overflows", process_set=ranks) if ranks.included() else own


#: The sums of all optimizers that accumulate.
_all_sums: WeakSet[_Sums] = WeakSet()


class _Sums:
    """The sums of gradients over several steps."""

    def __init__(self, passes: int, averages: bool) -> None:
        self._passes = passes
        self._averages = averages
        self._sums: list[tf.Variable] | None = None
        #: Number of gradients added so far.
        self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
        _all_sums.add(self)

    def add(self, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
        """Adds gradients and returns the sums."""
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if self._sums is None:
            with tf.init_scope():
                self._sums = [
                    tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False) for each in dense
                ]
        for total, gradient in zip(self._sums, dense, strict=True):
            total.assign_add(gradient)
        self.counter.assign_add(1)
        return [total.read_value() for total in self._sums]

    def forget(self) -> None:
        """Resets the sums and the counter."""
        for total in self._sums or ():
            total.assign(tf.zeros_like(total))
        self.counter.assign(0)

    def is_full(self) -> tf.Tensor:
        """Returns True if the gradients of a whole step have been added."""
        return tf.equal(self.counter, self._passes)

    def taken(self) -> list[tf.Tensor]:
        """Returns the sums, or their means, and resets them."""
        assert self._sums is not None, "gradients have been added"
        totals = [total.read_value() for total in self._sums]
        with tf.control_dependencies(totals):
            self.forget()
        if self._averages:
            totals = [total / tf.cast(self._passes, total.dtype) for total in totals]
        return totals


class _Reducing:
    """The base of distributed optimizers, before Keras' class in the method resolution order."""

    _options: Options
    _passes: int
    _averages: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin_reducing()

    def _begin_reducing(self) -> None:
        """Makes the additional attributes of a distributed optimizer."""
        # Without this, Keras would track the attributes and wrap their contents.
        object.__setattr__(self, "_local_vars", LocalVariables())
        sums = _Sums(self._passes, self._averages) if self._passes > 1 else None
        object.__setattr__(self, "_agg_helper", sums)

    def register_local_var(self, var: Any) -> None:
        """Excludes the gradient of a variable from the reduction."""
        self._local_vars.add(var)  # type: ignore[attr-defined]

    def _reduced(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        local: LocalVariables = self._local_vars  # type: ignore[attr-defined]
        reduced: list[Gradient] = reduce_gradients(gradients, variables, self._options, local)
        return reduced

    def _sums(self) -> _Sums | None:
        sums: _Sums | None = self._agg_helper  # type: ignore[attr-defined]
        return sums

    def _step_without_update(self) -> Any:
        self.iterations.assign_add(1)  # type: ignore[attr-defined]


class _ReducingWhenApplied(_Reducing):
    """The base of distributed optimizers of Keras 3."""

    def apply_gradients(self, grads_and_vars: Iterable[Any], **kwargs: Any) -> Any:
        """Applies gradients as the optimizer does, with a clear error if there are none.

        Raises:
            ValueError: There are no gradients.
        """
        pairs = list(grads_and_vars)
        if not pairs:
            raise ValueError(
                f"{type(self).__name__}.apply_gradients: there are no gradients; give it pairs of "
                "a gradient and a variable, and leave it out where nothing is trained"
            )
        apply_gradients: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        return apply_gradients(pairs, **kwargs)

    def apply(self, grads: Iterable[Gradient], trainable_variables: Any = None) -> Any:
        """Applies the reduced gradients as the optimizer does."""
        gradients = list(grads)
        keras: Any = self
        variables = list(
            keras_names.TRAINED.of(keras) if trainable_variables is None else trainable_variables
        )
        sums = self._sums()
        if sums is None:
            return self._update(gradients, variables, trainable_variables)
        if not keras.built:
            with tf.init_scope():
                keras.build(variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]

        def update() -> None:
            for i, total in zip(present, sums.taken(), strict=True):
                gradients[i] = total
            self._update(gradients, variables, trainable_variables)

        sums.add([gradients[i] for i in present])
        tf.cond(
            sums.is_full(), lambda: _nothing(update), lambda: _nothing(self._step_without_update)
        )
        return keras.iterations

    def _update(self, gradients: Sequence[Gradient], variables: Sequence[Any], given: Any) -> Any:
        """Reduces and applies gradients of these variables, of which the caller gave `given`."""
        return self._apply_plainly(self._reduced(gradients, variables), given)

    def _apply_plainly(self, gradients: Sequence[Gradient], variables: Any) -> Any:
        apply: Callable[..., Any] = super().apply  # type: ignore[misc]
        return apply(gradients, variables)


class _ReducingParts(HoldingParts, _ReducingWhenApplied):
    """The base of distributed optimizers of which each rank holds a part of the state."""


class _ReducingWhenComputed(_Reducing):
    """The base of distributed optimizers of `tf_keras`."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Computes gradients as the optimizer does, and reduces them."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Gradient, Any]]:
        """Does the work; optimizers before 2.11 call this name."""
        keras: Any = super()
        if hasattr(keras, "_compute_gradients"):
            pairs = keras._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = keras.compute_gradients(loss, var_list, tape=tape)
        gradients, variables = map(list, zip(*pairs, strict=True))
        sums = self._sums()
        if sums is None:
            return list(zip(self._reduced(gradients, variables), variables, strict=True))
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        own = sums.add([gradients[i] for i in present])
        named = [variables[i] for i in present]
        totals = tf.cond(sums.is_full(), lambda: self._reduced(sums.taken(), named), lambda: own)
        for i, total in zip(present, totals, strict=True):
            gradients[i] = total
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients as the optimizer does, at the end of a whole step."""
        apply: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        sums = self._sums()
        if sums is None:
            return apply(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        return tf.cond(
            tf.equal(sums.counter, 0),
            lambda: _nothing(lambda: apply(pairs, *args, **kwargs)),
            lambda: _nothing(self._step_without_update),
        )


def _nothing(act: Callable[[], Any]) -> tf.Tensor:
    """Calls `act`, and returns a tensor, since both branches of a `tf.cond` must return one."""
    act()
    return tf.constant(True)
