"""Repairs of Keras 3 under `CustomCollectiveStrategy`, also for scripts that were given one.

Keras computes some values from one replica's gradients or batch, although they depend on those of
all replicas. Each function in `_replacements` replaces one function of Keras and gets the original
as its first argument. The replacement runs only under our strategy; elsewhere the original runs.

Errors of older Keras versions that cannot be repaired raise a `ConfigError`; docs/compatibility.md
lists them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.gradients.names import name_of
from gradring.tensorflow.data import absent_parts
from gradring.tensorflow.files import whole_files
from gradring.tensorflow.graph import compat, own_draws, replica_step
from gradring.tensorflow.graph.adoption import (
    adopt,
    communicator_of,
    is_given,
    scope_of,
    strategy_of,
)
from gradring.tensorflow.graph.context import holding
from gradring.tensorflow.graph.cross_device_ops import current_variables
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras import (
    empty_batches,
    fit_callbacks,
    given,
    given_gradients,
    given_losses,
    given_metrics,
    gradient_norm,
    inseparable_losses,
    keras_loops,
    legacy_steps,
    loop_arguments,
    metric_logs,
    own_means,
    sample_shares,
    summed_losses,
    synchronised_moments,
)
from gradring.tensorflow.keras.moving_statistics import normalise
from gradring.tensorflow.replicas import compare_beginnings
from gradring.tensorflow.rules import loaded, updates
from gradring.tensorflow.rules.replicas import rule_of
from gradring.tensorflow.rules.updates import is_wrapper, updates_of
from gradring.tensorflow.seams import keras_names as names
from gradring.tensorflow.seams.table import (
    Found,
    Replacement,
    Seam,
    find,
    parsed,
    replace,
    version_of,
)

_SUM = tf.distribute.ReduceOp.SUM

_repaired = False
_watched = False

_makes_example: ContextVar[bool] = ContextVar("makes_example", default=False)


def makes_example() -> bool:
    """Returns whether Keras builds a throwaway object only to list its attributes."""
    return _makes_example.get()


def repair() -> None:
    """Installs the replacements in Keras 3, and refusals in tf_keras, if they have been imported.

    Raises:
        gradring.errors.ConfigError: This Keras lacks names that training needs. Nothing has been
            replaced.
    """
    global _repaired
    _watch_tf_keras()
    own_draws.install_in_operations()
    keras: Any = sys.modules.get("keras")
    # Keras is still being imported while this attribute is missing.
    if _repaired or not hasattr(keras, "callbacks"):
        return
    if keras.backend.backend() != "tensorflow":
        return
    replace([look(), compat.FOUND], _replacements())
    own_draws.install()
    sample_shares.count()
    absent_parts.let_be_empty()
    _repaired = True


def look() -> Found:
    """Looks up the private names that gradring needs in the imported Keras."""
    return find("keras", names.SEAMS)


def _replacements() -> Iterator[Replacement]:
    """Yields the replacements of Keras' functions; a later one wraps earlier ones of its seam."""
    of_optimizers: dict[Seam, Callable[..., Any]] = {
        names.APPLY: _apply,
        names.APPLY_SCALED: _apply,
        names.APPLY_GRADIENTS: _name_gradients,
        names.CLIP_GRADIENTS: _clip_gradients,
        names.UPDATE_STEP: _update_step,
        names.SUM_GRADIENTS: _sum_gradients,
        names.CHECK_FINITE: _check_finite,
    }
    for seam, stand_in in of_optimizers.items():
        yield _traced(seam, stand_in, _in_replica_by_rule)
    yield _traced(names.APPLY, _apply_alone, _has_own_rule)
    yield _traced(names.CLIP_GRADIENTS, _clip_alone, _has_own_rule)
    yield _traced(compat.row("GradientTape.gradient"), own_means.gradient, _in_replica_by_rule)
    in_a_step: dict[Seam, Callable[..., Any]] = {
        names.NORMALISE: normalise,
        compat.row("ReplicaContext.all_reduce"): empty_batches.all_reduce,
        names.MOMENTS_SYNC: synchronised_moments.moments,
        names.MOMENTS: synchronised_moments.moments_of_layer,
        names.UPDATE_MEAN: sample_shares.update_mean,
        names.SCALE_LOSS: _scale_loss,
        names.UNSCALE_LOSS: _unscale_loss,
        names.REDUCE_WEIGHTED: _reduce_weighted_values,
        names.REDUCE_VALUES: _reduce_values,
        names.ADDITIONAL_LOSS: _additional_loss,
    }
    for seam, stand_in in in_a_step.items():
        yield _traced(seam, stand_in, _in_our_replica)
    yield _traced(names.NORMALISE, empty_batches.keep_statistics, empty_batches.may_come_outside)
    for seam in (names.LAYER_CALL, names.LOSS_CALL):
        yield _traced(seam, empty_batches.call, empty_batches.may_come)
    yield _traced(names.ADD_LOSS, empty_batches.add_loss, empty_batches.may_come)
    yield _traced(names.SYMBOLIC_BUILD, keras_loops.symbolic_build, _is_ours)
    for loop, seam in _MAKE_STEP.items():
        make = functools.partial(keras_loops.make_step, f"{loop}_function")
        yield _traced(seam, make, _is_ours)
    yield _traced(names.MAKE_FUNCTION, sample_shares.make_function, _is_ours)
    yield _plain(names.COMPILE, _compile, _is_ours)
    yield _traced(names.BUILD_OPTIMIZER, _build, _always)
    yield _traced(names.ADD_VARIABLE, _add_variable, _always)
    yield _plain(names.FINALIZE, _finalize, _always)
    yield _plain(names.SAVE_OPTIMIZER, _save_optimizer, _always)
    yield _plain(names.FIT, fit_callbacks.fit, _is_ours)
    for seam in (names.EVALUATE, names.PREDICT):
        yield _plain(seam, keras_loops.with_equal_replicas, _is_ours)
    # The comparison of arguments is a loop's first collective. `leave` wraps it, so a rank that
    # fails there counts as one that left a step.
    for seam in (names.FIT, names.EVALUATE, names.PREDICT):
        yield _plain(seam, loop_arguments.compared, _is_ours)
        yield _plain(seam, keras_loops.leave, _is_ours)
    yield _plain(names.PREDICT_ON_BATCH, keras_loops.predict_on_batch, _is_ours)
    yield _traced(names.REDUCE_LOGS, keras_loops.reduce_logs, _always)
    for seam in (names.BEGIN_EPOCHS, names.RESET_EPOCHS):
        yield _plain(seam, keras_loops.make_epochs, _always)
    for seam in (names.BATCHES, names.BATCHES_BEFORE_37):
        yield _plain(seam, keras_loops.enumerate_epoch, _always)
    yield _traced(names.LOGS_OF_EPOCH, keras_loops.logs_of_epoch, _is_ours)
    for seam in (names.SKIPPED_ATTRIBUTES, names.SKIPPED_BEFORE_36):
        yield _traced(seam, _attributes_of_all, _in_our_scope)
    for seam in (names.SAVE_MODEL, names.SAVE_WEIGHTS, names.SAVE_HDF5):
        yield _plain(seam, whole_files.save, _always)
    yield _plain(names.SAVE_HDF5, _save_hdf5, _always)
    yield _plain(names.LOAD_WEIGHTS, loaded.note, _is_ours)
    yield _traced(names.CHECKPOINT, fit_callbacks.checkpoint, _trains_under_ours)
    yield _traced(names.BACKUP_BEGIN, fit_callbacks.restore, _trains_under_ours)
    yield _traced(names.BACKUP_SAVE, fit_callbacks.backup, _trains_under_ours)
    yield _traced(names.BACKUP_END, fit_callbacks.on_chief, _trains_under_ours)
    in_fit: dict[Seam, Callable[..., Any]] = {
        names.TRAIN_BEGIN: fit_callbacks.begin,
        names.BATCH_END: fit_callbacks.end_batch,
        names.EPOCH_END: fit_callbacks.end_epoch,
        names.TRAIN_END: fit_callbacks.end,
    }
    for seam, stand_in in in_fit.items():
        yield _traced(seam, stand_in, fit_callbacks.is_in_fit)
    for seam in (names.EPOCH_END, names.TRAIN_END):
        yield _traced(seam, fit_callbacks.with_whole_state, fit_callbacks.may_have_parts_alone)
    if parsed(version_of("keras")) < _HAS_METRICS_OF_REPLICAS:
        for seam in (names.MAKE_TRAIN, names.MAKE_TEST):
            yield _traced(seam, _refuse_model, _has_several_replicas)
    yield from _replacements_if_given()


def _replacements_if_given() -> Iterator[Replacement]:
    """Yields the replacements for programs that know of no replicas."""
    yield _traced(compat.row("GradientTape.gradient"), given_gradients.gradient, given.is_in_step)
    for seam in (names.APPLY, names.APPLY_SCALED):
        yield _traced(seam, given_gradients.apply, given.is_in_step)
        yield _traced(seam, given_gradients.apply_outside, given.is_outside)
    yield _traced(names.ADD_VARIABLE, given_gradients.add_variable, given.is_in_step)
    yield _traced(names.LOGS_OF_EPOCH, given_metrics.logs_of_epoch, _is_given)
    loops = (names.FIT, names.EVALUATE, names.PREDICT)
    for seam in loops:
        yield _plain(seam, given.begins_equal, _is_given)
    for seam in (*loops, names.MAKE_TRAIN, names.MAKE_TEST):
        yield _plain(seam, given.joining, given.is_outside)
    yield _plain(names.COMPILE, given.compiling, given.is_outside)


_MAKE_STEP = {"train": names.MAKE_TRAIN, "test": names.MAKE_TEST, "predict": names.MAKE_PREDICT}
#: First Keras version with correct metrics on several replicas.
_HAS_METRICS_OF_REPLICAS = parsed("3.10")


def _plain(seam: Seam, stand_in: Callable[..., Any], applies: Callable[[Any], bool]) -> Replacement:
    """Replaces an untraced function; AutoGraph must still convert the program's code it calls."""
    return Replacement(seam, stand_in, applies, lambda function: function)


def _traced(
    seam: Seam, stand_in: Callable[..., Any], applies: Callable[[Any], bool]
) -> Replacement:
    return Replacement(seam, stand_in, applies, tf.autograph.experimental.do_not_convert)


def _in_our_replica(_: Any) -> bool:
    """Returns whether the code runs in a replica of `CustomCollectiveStrategy`."""
    context = tf.distribute.get_replica_context()
    return context is not None and communicator_of(context.strategy) is not None


def _in_replica_by_rule(_: Any) -> bool:
    """Returns whether a replica runs whose strategy the program made, so its rule applies."""
    return _in_our_replica(_) and not is_given(tf.distribute.get_strategy())


def _has_own_rule(optimizer: Any) -> bool:
    """Returns whether an optimizer follows an update rule outside of strategies."""
    return updates_of(None, optimizer) is not updates.NO_RULE


def _is_given(model: Any) -> bool:
    return is_given(model.distribute_strategy)


def _always(_: Any) -> bool:
    """Applies to every call; the replacement finds the strategy by itself."""
    return True


def _in_our_scope(_: Any) -> bool:
    return communicator_of(tf.distribute.get_strategy()) is not None


def _is_ours(model: Any) -> bool:
    return communicator_of(model.distribute_strategy) is not None


def _trains_under_ours(callback: Any) -> bool:
    return _is_ours(callback.model)


def _has_several_replicas(model: Any) -> bool:
    strategy = model.distribute_strategy
    return communicator_of(strategy) is not None and strategy.num_replicas_in_sync > 1


# Older versions


def _refuse_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"{_this_keras()} computes wrong metrics in `fit` and `evaluate` on several workers, and "
        "before 3.8 adds up their losses: install keras>=3.10, or use a custom training loop"
    )


def _watch_tf_keras() -> None:
    """Makes tf_keras optimizers refuse update rules that they cannot follow, and warn of sums.

    Training by tf_keras needs no repairs under a strategy.
    """
    global _watched
    legacy: Any = sys.modules.get("tf_keras")
    if _watched or not hasattr(legacy, "callbacks"):
        return
    replace([find("tf_keras", names.LEGACY), compat.FOUND], _replacements_in_tf_keras())
    _watched = True


def _replacements_in_tf_keras() -> Iterator[Replacement]:
    for seam in (names.LEGACY_APPLY, names.OLDEST_APPLY):
        yield _traced(seam, summed_losses.check_legacy, _in_our_replica)
        yield _traced(seam, _refuse_tf_keras, _has_another_rule)
    yield _traced(names.LEGACY_LOSS, legacy_steps.loss, _in_our_replica)
    yield _traced(names.LEGACY_LOSS, summed_losses.noting_legacy, _in_our_replica)
    yield _traced(names.LEGACY_MEAN, legacy_steps.update_mean, _in_our_replica)
    yield _traced(
        compat.row("GradientTape.gradient"), legacy_steps.refuse_loop, legacy_steps.trains_outside
    )
    yield _traced(names.LEGACY_SCALE_LOSS, summed_losses.noting, _in_our_replica)
    yield _plain(names.LEGACY_FIT, fit_callbacks.fit, _is_ours)
    for seam in (names.LEGACY_FIT, names.LEGACY_EVALUATE, names.LEGACY_PREDICT):
        yield _plain(seam, loop_arguments.compared, _is_ours)
    yield _plain(names.LEGACY_BATCH_END, fit_callbacks.end_batch, fit_callbacks.is_in_fit)
    yield _plain(names.LEGACY_EPOCH_END, fit_callbacks.end_epoch, fit_callbacks.is_in_fit)


def _has_another_rule(_: Any) -> bool:
    return type(updates_of(tf.distribute.get_strategy())) is not updates.Updates


def _refuse_tf_keras(original: Callable[..., Any], optimizer: Any, *args: Any, **_: Any) -> None:
    rule = tf.distribute.get_strategy().update_rule
    raise ConfigError(
        f"update={rule} works in optimizers of Keras 3, and {type(optimizer).__name__} is one of "
        "tf_keras; use one of Keras 3, or leave out update="
    )


def _refuse_clipping() -> None:
    raise ConfigError(
        f"{_this_keras()} clips gradients before it accumulates them, so they would be reduced "
        "twice: install keras>=3.5, or use `gradient_accumulation_steps` without clipping"
    )


def _this_keras() -> str:
    return f"Keras {sys.modules['keras'].__version__}"


# Optimizers


class _Reduced(list[Any]):
    """Gradients that have already been summed over all replicas."""


def _apply(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Stands in for `Optimizer.apply`: applies gradients by the strategy's update rule."""
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    grads = list(grads)
    gradient_norm.note_own(optimizer, grads)
    own_means.check(optimizer, grads, trainable_variables or ())
    strategy = tf.distribute.get_strategy()
    _warn_of_variables_outside(optimizer, trainable_variables, strategy)
    rule = updates_of(strategy)
    updates.apply(rule, original, optimizer, grads, trainable_variables)


def _apply_alone(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Stands in for `Optimizer.apply`: applies gradients by the rule of the optimizer."""
    rule = updates_of(None, optimizer)
    updates.apply(rule, original, optimizer, list(grads), trainable_variables)


def _warn_of_variables_outside(optimizer: Any, variables: Any, strategy: Any) -> None:
    """Warns at an optimizer's first step if its variables begin differently on the ranks.

    Variables made outside of any scope have not received the chief's initial values.

    Raises:
        gradring.errors.ConfigError: The optimizer was made outside, too, so `tf.distribute` could
            not update the variables.
    """
    if getattr(optimizer, "_gradring_began", False):
        return
    optimizer._gradring_began = True
    variables = variables or list(names.TRAINED.of(optimizer, ()))
    communicator = communicator_of(strategy)
    if communicator is None or not strategy.extended._has_one_replica:
        return
    if variables and strategy_of(variables) is None:
        own = names.DISTRIBUTION_STRATEGY.of(optimizer, strategy)
        if own is not strategy and not is_given(strategy):
            raise ConfigError(
                f"{optimizer.name}.apply on rank {communicator.rank} of {communicator.host}: the "
                f"optimizer and its variables, such as {name_of(variables[0])}, were made outside "
                "of the strategy's scope; make the model and the optimizer inside of "
                "`with strategy.scope():`"
            )
        optimizer._gradring_began = compare_beginnings(variables, communicator)


def _name_gradients(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any
) -> Any:
    """Names reductions after the variables, which Keras does not pass to `tf.distribute`."""
    named: AbstractContextManager[None] = nullcontext()
    with falls_back("the names of gradients in messages", "messages have their numbers"):
        named = updates.gradients_by(optimizer, grads, trainable_variables)
    with named:
        return original(optimizer, grads, trainable_variables)


def _clip_gradients(original: Callable[..., Any], optimizer: Any, grads: Any) -> Any:
    """Clips the sum of all replicas' gradients, as one process would; Keras clips each part."""
    if not _clips(optimizer):
        return original(optimizer, grads)
    present = [gradient for gradient in grads if gradient is not None]
    # `_name_gradients` wraps the accumulation; Keras before 3.5 clips outside of this call.
    if optimizer.gradient_accumulation_steps and current_variables(len(present)) is None:
        _refuse_clipping()
    sums = tf.distribute.get_replica_context().all_reduce(_SUM, present)
    gradient_norm.note_reduced(optimizer, sums)
    reduced = iter(sums)
    complete = [None if gradient is None else next(reduced) for gradient in grads]
    rule = updates_of(tf.distribute.get_strategy())
    return _Reduced(rule.clip(functools.partial(original, optimizer), optimizer, complete))


def _clip_alone(original: Callable[..., Any], optimizer: Any, grads: Any) -> Any:
    """Clips reduced gradients by the rule of the optimizer."""
    rule = updates_of(None, optimizer)
    return rule.clip(functools.partial(original, optimizer), optimizer, grads)


def _clips(optimizer: Any) -> bool:
    return bool(optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue)


def _update_step(
    original: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any,
    learning_rate: Any,
) -> None:
    rule = updates_of(tf.distribute.get_strategy())
    with replica_step.holding(has_sums=isinstance(grads, _Reduced)):
        step = functools.partial(original, optimizer)
        rule.step(step, optimizer, grads, trainable_variables, learning_rate)


def _sum_gradients(original: Callable[..., Any], optimizer: Any, grads_and_vars: Any) -> Any:
    """Sums gradients over the replicas, unless `_clip_gradients` has already summed them.

    Raises:
        gradring.errors.ConfigError: Gradients were clipped before they were reduced.
    """
    if replica_step.current().has_sums:
        return list(grads_and_vars)
    if _clips(optimizer):
        raise ConfigError(
            f"{_this_keras()} clips each rank's part of the gradients for {optimizer.name}, and "
            "not their sum; install a version that `gradring env` names as tried, or leave out "
            "clipping"
        )
    reduced = original(optimizer, grads_and_vars)
    gradient_norm.note_reduced(optimizer, [gradient for gradient, _ in reduced])
    return reduced


def _check_finite(original: Callable[..., Any], optimizer: Any, grads: Any) -> Any:
    """Returns whether the gradients of all replicas are finite, so all skip the same steps."""
    add_up = functools.partial(tf.distribute.get_replica_context().all_reduce, _SUM)
    return _on_all(original(optimizer, grads), add_up)


def _on_all(is_finite: tf.Tensor, add_up: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.equal(add_up(tf.cast(tf.logical_not(is_finite), tf.int32)), 0)


def skip_alike(inner: type, add_up: Callable[[Any, tf.Tensor], tf.Tensor]) -> None:
    """Makes a `LossScaleOptimizer` around `inner` optimizers skip the same steps on all ranks.

    Otherwise a rank whose gradients overflow would leave out a reduction, and its later gradients
    would be reduced with those of another step.

    Args:
        inner: The class of optimizers that reduce gradients by themselves, outside of strategies.
        add_up: Takes an `inner` optimizer and a scalar; returns the sum over its ranks.
    """

    def check(original: Callable[..., Any], outer: Any, grads: Any) -> tf.Tensor:
        is_finite = original(outer, grads)
        return _on_all(is_finite, functools.partial(add_up, outer.inner_optimizer))

    def applies(outer: Any) -> bool:
        return isinstance(outer.inner_optimizer, inner)

    replace([find("keras", [names.CHECK_FINITE])], [_traced(names.CHECK_FINITE, check, applies)])


# Losses


def _scale_loss(original: Callable[..., Any], value: Any) -> Any:
    """Divides a loss by the number of replicas, weighs it, and marks it as divided."""
    count = tf.distribute.get_strategy().num_replicas_in_sync
    # Keras rounds 1 / count to float32 even if the loss is float64.
    divided = value / count if value.dtype == tf.float64 else original(value)
    scaled = sample_shares.weighed(divided)
    scaled._gradring_is_scaled = True
    summed_losses.note()
    return scaled


def _unscale_loss(original: Callable[..., Any], value: Any) -> Any:
    """Multiplies a logged loss by the number of replicas, unless Keras has not divided it.

    Keras divides no losses of single samples, which reduction "none" returns.
    """
    return value if tf.is_tensor(value) and value.shape.rank else original(value)


def _reduce_weighted_values(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Keeps the mask for `_reduce_values`; Keras has multiplied it into the weights by then."""
    with replica_step.holding(mask=mask):
        return original(values, sample_weight, mask, *args, **kwargs)


def _reduce_values(original: Callable[..., Any], values: Any, *args: Any, **kwargs: Any) -> Any:
    """Weighs a loss; also divides a scalar loss of a whole batch, such as Dice.

    Keras does not divide such a scalar by the number of replicas.
    """
    bound = inspect.signature(original).bind(values, *args, **kwargs)
    bound.apply_defaults()
    weights, reduction = bound.arguments["sample_weight"], bound.arguments["reduction"]
    if reduction in (None, "none"):
        return original(values, *args, **kwargs)
    # The variables of a metric of the program are added up over the ranks.
    is_in_metric = metric_logs.is_adding_up()
    if is_given(tf.distribute.get_strategy()):
        part = given_losses.checked_part(values, is_weighed=not is_in_metric)
        if part is not None:
            return part
    else:
        inseparable_losses.check([values])
    if reduction == "sum":
        total = original(values, *args, **kwargs)
        return total if is_in_metric else sample_shares.weighed_sum(total)
    if is_given(tf.distribute.get_strategy()) and given_losses.are_of_whole_batch(values):
        reduced = original(values, *args, **kwargs)
        if given_losses.are_sums([values]):
            return given_losses.sum_of_samples(reduced)
    else:
        with sample_shares.divided(values, weights, replica_step.current().mask, reduction):
            reduced = original(values, *args, **kwargs)
    return names.SCALE_LOSS.there()(reduced) if values.shape.rank == 0 else reduced


def _additional_loss(original: Callable[..., Any], model: Any, loss: Any) -> Any:
    """Divides a Keras loss passed to `add_loss` only once; Keras itself divides it twice.

    A sum over samples is not divided, nor are values of single samples, which Keras adds up: the
    sums of all ranks add up.
    """
    total = names.PLAIN_ADDITIONAL_LOSS.there()(model, loss)
    if getattr(loss, "_gradring_is_scaled", False):
        return total
    part = given_losses.part_of_terms(total) if is_given(tf.distribute.get_strategy()) else None
    if part is not None:
        return part
    inseparable_losses.check_added(model, loss)
    with falls_back("the sum over ranks of a sum in add_loss", "it is averaged as a mean is"):
        if given_losses.is_sum_of_samples(loss, total):
            return sample_shares.weighed_sum(total)
    return total if is_given(tf.distribute.get_strategy()) else original(model, loss)


# Building and saving


def _compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    """Compiles in the model's scope, so that optimizer and metrics are made in it as well."""
    strategy = model.distribute_strategy
    # In the scope of a given strategy, an optimizer would use it to update the plain variables.
    with nullcontext() if is_given(strategy) else scope_of(strategy):
        original(model, *args, **kwargs)


def _build(original: Callable[..., Any], optimizer: Any, variables: Any) -> None:
    """Moves an optimizer that was made outside of any scope into the scope of its variables."""
    strategy = strategy_of(variables)
    own = names.DISTRIBUTION_STRATEGY.of(optimizer)
    if communicator_of(strategy) is not None and own is not strategy:
        names.DISTRIBUTION_STRATEGY.set(optimizer, strategy)
        adopt(optimizer.variables, strategy)
    if not is_wrapper(optimizer):
        updates_of(strategy, optimizer).build(optimizer, variables)
    original(optimizer, variables)


def _add_variable(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes a variable of an optimizer's state by the update rule."""

    def make() -> Any:
        return original(optimizer, reference_variable, *args, **kwargs)

    rule = updates_of(strategy_of([reference_variable]), optimizer)
    return rule.add_variable(make, optimizer, reference_variable)


def _finalize(original: Callable[..., Any], optimizer: Any, var_list: Any) -> None:
    """Gives variables their averages at the end of `fit`, if the optimizer has `use_ema`."""
    if optimizer.use_ema:
        rule_of(list(var_list)).sync(var_list)
    original(optimizer, var_list)


def _save_optimizer(original: Callable[..., Any], optimizer: Any, store: Any) -> None:
    """Saves the state of an optimizer, after its rule has prepared it."""
    trained = names.TRAINED.of(optimizer, ())
    rule_of(trained).before_saving(trained)
    original(optimizer, store)


def _save_hdf5(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves in the older format, which reads the optimizer's variables themselves."""
    trained = model.trainable_variables
    rule_of(trained).before_saving(trained)
    return original(model, *args, **kwargs)


def _attributes_of_all(original: Callable[..., Any], kind: str) -> Any:
    """Lets one rank save or load alone, even inside the strategy's scope.

    Keras makes a throwaway optimizer to list the attributes that every optimizer has. Without this
    flag its variables would be broadcast, and other ranks may neither save nor load at this time.
    """
    with holding(_makes_example, True):
        return original(kind)
