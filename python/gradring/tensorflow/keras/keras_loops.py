"""Loops of Keras 3: the steps of `fit`, `evaluate` and `predict`, and the loops around them.

Each public function stands in for one of Keras and gets the original as its first argument;
`compat_keras.py` says for which one, and when.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.data import data_order
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import adopt, communicator_of, is_given
from gradring.tensorflow.graph.context import holding
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras import (
    empty_batches,
    given,
    given_metrics,
    metric_logs,
    sample_shares,
    unlike_models,
)
from gradring.tensorflow.rules.replicas import sync_model
from gradring.tensorflow.rules.updates import updates_of
from gradring.tensorflow.seams import keras_names

_logger = logging.getLogger("gradring")

_BUILD = "the build of a model before its first step"


def reduce_logs(original: Callable[..., Any], logs: Any, strategy: Any, reduction: str) -> Any:
    """Averages the loss and all metrics of a step in one collective; Keras runs one for each."""
    if communicator_of(strategy) is not None and reduction == "auto":
        if updates_of(strategy).are_local:
            return logs
        # Tensors on different devices would not be packed into one collective.
        with tf.device(strategy.extended.worker_devices[0]):
            values = tf.nest.map_structure(_log, logs)
        return strategy.reduce("MEAN", values, axis=None)
    if _in_own_rows.get() and reduction == "concat":
        # Each local replica has predicted the whole batch.
        return tf.nest.map_structure(lambda it: strategy.experimental_local_results(it)[0], logs)
    if is_given(strategy) and reduction == "concat":
        # Keras would split outputs by the number of replicas, which is 1 for this strategy.
        return tf.nest.map_structure(lambda part: strategy.gather(part, axis=0), logs)
    return original(logs, strategy, reduction)


def _log(value: Any) -> Any:
    """Converts a log to a tensor; `PerReplica` values of local replicas stay as they are.

    A program's own metric may return its variable, and its own step a Python number.
    """
    is_variable = isinstance(value, tf.Variable)
    if isinstance(value, compat.DistributedValues) and not is_variable:
        return value
    # A variable's value has the variable's device, under another name.
    return tf.identity(value)


def logs_of_epoch(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Reads metrics on all ranks, and converts variables in the logs to tensors.

    Some Keras versions pass variables to callbacks, whose values change later.

    Under an update rule of local steps, the ranks' logs are averaged here instead of in each step.
    """
    if updates_of(model.distribute_strategy).are_local:
        with tf.device(model.distribute_strategy.extended.worker_devices[0]):
            values = tf.nest.map_structure(_log, logs)
        logs = model.distribute_strategy.reduce("MEAN", values, axis=None)
    return tf.nest.map_structure(
        lambda log: tf.convert_to_tensor(log) if hasattr(log, "assign") else log,
        metric_logs.logs_of_epoch(original, model, logs),
    )


class _StepFunction:
    """Keras' function for one execution of its loop, run inside of `Communicator.step`."""

    def __init__(
        self,
        function: Callable[..., Any],
        communicator: Communicator,
        begin: Callable[[], None],
        take: Callable[[Any], Any],
        finish: Callable[[Any, Any], Any],
        own_batches: unlike_models.OwnBatches | None,
    ) -> None:
        self._function = function
        self._communicator = communicator
        #: Takes note of a step that begins.
        self._begin = begin
        #: Converts the loop's argument into the function's.
        self._take = take
        #: Takes the loop's argument and the function's logs; returns the final logs.
        self._finish = finish
        #: Comparison of batches that come from no (distributed) iterator, or None.
        self._own_batches = own_batches
        #: The function for `predict_on_batch`, once there is one.
        self.own_rows: Any = None

    def __call__(self, batches: Any) -> Any:
        self._begin()
        own = None if given.are_of_loop(batches) else self._own_batches
        if own is not None:
            batches = own.before(iter(batches))
        with self._communicator.step():
            logs = self._finish(batches, self._function(self._take(batches)))
        if own is not None:
            own.after()
        return logs

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # missing while the object is being copied
            raise AttributeError(name)
        return getattr(self._function, name)


def _begin_step(model: Any, function: str) -> None:
    if function != "predict_function":  # which leaves metrics as they are
        metric_logs.begin(model, function)
        given_metrics.return_own_values(model)


def _as_it_is(batches: Any) -> Any:
    return batches


def _logs_as_they_are(batches: Any, logs: Any) -> Any:
    return logs


def make_step(
    name: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps a loop's function in `_StepFunction`, and adopts the model's metrics."""
    strategy = model.distribute_strategy
    if _in_own_rows.get():
        original(model, *args, **kwargs)
        return model.predict_function
    if isinstance(getattr(model, name), _OwnRows):
        setattr(model, name, None)
    if not is_given(strategy):
        adopt(model.metrics_variables, strategy)
    elif getattr(model, name) is None:
        given.give_values_of_chief(model)
    original(model, *args, **kwargs)
    function = getattr(model, name)
    if not isinstance(function, _StepFunction):
        # `sample_shares.make_function` weighs the functions for training and testing.
        weighed = functools.partial(sample_shares.own_batches, strategy)
        take = _as_it_is if name == "predict_function" else weighed
        is_plain = name == "predict_function" or not is_given(strategy)
        finish = (
            _logs_as_they_are if is_plain else functools.partial(given_metrics.logs_of_batch, model)
        )
        own = unlike_models.OwnBatches(model) if name == "train_function" else None
        begin = functools.partial(_begin_step, model, name)
        step = _StepFunction(function, strategy.communicator, begin, take, finish, own)
        setattr(model, name, step)
    return getattr(model, name)


def make_epochs(original: Callable[..., Any], epochs: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for making and resetting Keras' epoch iterator; the ranks end epochs together.

    Keras takes the number of batches from the dataset before it is divided. If each rank has its
    own dataset, its batches are smaller and some ranks have more of them. So only the distributed
    iterators know when an epoch ends.
    """
    original(epochs, *args, **kwargs)
    _follow_iterators(epochs)


def enumerate_epoch(original: Callable[..., Any], epochs: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the epoch iterator's batches; lifts Keras' limit, the first epoch's number.

    A rank may have more batches in a later epoch, if its dataset yields other elements there.
    """
    _follow_iterators(epochs)
    return original(epochs, *args, **kwargs)


def _follow_iterators(epochs: Any) -> None:
    communicator = communicator_of(keras_names.EPOCHS_STRATEGY.of(epochs, None))
    dataset = keras_names.EPOCHS_DATASET.of(epochs, None)
    if communicator is None or not compat.is_undivided(dataset):
        return
    keras_names.EPOCHS_BATCHES.set(epochs, None)
    batches = f"{dataset.cardinality == tf.data.INFINITE_CARDINALITY} {dataset.element_spec}"
    if gather_if_different(communicator, batches.encode(), "fit: batches") is not None:
        compat.let_batches_differ(dataset)


def with_equal_replicas(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `evaluate` and `predict`; first makes the ranks' models equal.

    The models may differ between synchronisations of some update rules.
    """
    # `predict` needs no compiled model, and others have no attribute.
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    needs_state = not updates_of(model.distribute_strategy).holds_parts
    # `SwapEMAWeights` takes the averages from the state.
    if needs_state or getattr(optimizer, "use_ema", False):
        sync_model(model)
    # A validation of `fit` reuses an iterator over data that has already been divided.
    if kwargs.get(keras_names.CACHED_EVALUATION.name):
        return original(model, *args, **kwargs)
    with model.distribute_strategy.extended.whole_data():
        return original(model, *args, **kwargs)


@dataclass
class _OwnRows:
    """Keras' function for `predict_on_batch`, in place of that of `predict` before there is one."""

    own_rows: Any = None


#: True in `predict_on_batch`.
_in_own_rows: ContextVar[bool] = ContextVar("in_own_rows", default=False)


def predict_on_batch(original: Callable[..., Any], model: Any, x: Any) -> Any:
    """Predicts the given batch on each rank by itself, without a collective.

    Keras divides no batch here, and would return the rows of all ranks' batches. The function is
    another one than that of `predict`. It is kept where Keras drops both, as in `compile`.
    """
    keeper = model.predict_function
    if not isinstance(keeper, _StepFunction | _OwnRows):
        keeper = _OwnRows()
    model.predict_function = keeper.own_rows
    try:
        with holding(_in_own_rows, True):
            return original(model, x)
    finally:
        keeper.own_rows, model.predict_function = model.predict_function, keeper


def leave(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a loop; an exception between steps counts as a step that was left early.

    Otherwise a rank that leaves the loop alone, as by a callback's error, could begin another loop
    and mix its sums with those of the others' steps. After the loop, the ranks compare batches.
    """
    strategy = model.distribute_strategy
    with data_order.warning_once():
        try:
            returned = original(model, *args, **kwargs)
        except BaseException:
            with strategy.communicator.step():
                raise
    unlike_models.compare_batches(strategy)
    return returned


def symbolic_build(
    original: Callable[..., Any], model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds a model from this replica's part of the first batch.

    Keras would build from the mean over all replicas' parts, which fails for parts of different
    sizes and for strings. Only shapes and dtypes matter. For batches made in Python, as by a
    generator, the model is built from the signature that Keras has inferred. For other data it is
    built from the dataset's element spec, if that determines the shapes.

    A model without `call`, such as a GAN, cannot be traced: only its own `train_step` knows which
    layers it calls, and with which parts of a batch. This kind of model is built in its first step,
    as Keras does without a strategy. The same holds if a batch does not determine the shapes.
    """
    if is_given(model.distribute_strategy):
        return  # its variables belong to no strategy, so the first step builds it
    if type(model).call is sys.modules["keras"].Model.call:
        return
    if iterator is not None:
        data_batch = _example(iterator, model.distribute_strategy.extended.builds_from_batch)
    if data_batch is None:
        return
    with falls_back(_BUILD, "the first step builds it, as in one process"):
        original(model, data_batch=data_batch)


@falls_back(_BUILD, "the first step builds it, as in one process")
def _example(iterator: Any, takes_batch: bool) -> Any:
    """Returns a batch of this replica, or its signature; None if neither is available.

    An iterator more shuffles a dataset with a seed once more than in one process. Keras takes it
    under all strategies, so a job that must equal one of them needs it (`takes_batch`). The ranks
    take the batch together, so those whose datasets may differ all do.
    """
    adapter = getattr(iterator, "data_adapter", None)
    signature = keras_names.OUTPUT_SIGNATURE.of(adapter, None)
    if signature is not None:
        # A batch taken from a generator here would be missing in training.
        return signature
    takes_batch = takes_batch or compat.is_undivided(keras_names.EPOCHS_DATASET.of(iterator))
    spec = None if takes_batch else _element_spec(iterator)
    if spec is not None and all(map(_has_known_rows, tf.nest.flatten(spec))):
        return spec
    # In older Keras versions, the epoch iterator has no `__iter__`.
    epoch = iterator if hasattr(iterator, "__iter__") else iterator.enumerate_epoch()
    for *_, batches in epoch:
        batch = next(batches, None)
        if batch is None:
            # An epoch may have no steps left after a commit at its last step. All ranks read the
            # metrics at its end, so a rank that has just joined must build them.
            return _element_spec(iterator)
        # The model is built for batches with samples, even if this one is empty.
        return empty_batches.with_row(compat.select_replica(0, batch))
    return None


def _has_known_rows(spec: Any) -> bool:
    """Returns whether only the number of samples is unknown of a part of a batch."""
    is_dense = isinstance(spec, tf.TensorSpec)
    return is_dense and bool(spec.shape.rank) and spec.shape[1:].is_fully_defined()


def _element_spec(iterator: Any) -> Any:
    """Returns the element spec of one replica's batch, or None if a shape's rank is unknown."""
    spec = compat.spec_of_replica(keras_names.EPOCHS_DATASET.of(iterator).element_spec)
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(spec)]
    return None if any(shape is None or shape.rank is None for shape in shapes) else spec
