"""The loops of Keras 3: what `fit`, `evaluate` and `predict` do in each step and around all.

Each public function stands in for one of Keras and gets the original as its first argument;
`compat_keras.py` says for which, and when.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.data import data_order
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import adopt, communicator_of, is_given
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras import empty_batches, given, sample_shares
from gradring.tensorflow.rules.replicas import sync_model
from gradring.tensorflow.rules.updates import updates_of
from gradring.tensorflow.seams import keras_names

_logger = logging.getLogger("gradring")

_BUILD = "the build of a model before its first step"


def reduce_logs(original: Callable[..., Any], logs: Any, strategy: Any, reduction: str) -> Any:
    """Averages the loss and all metrics of a step in one message; Keras sends one for each.

    A program's own metric may return its variable, and its own step a Python number.
    """
    if communicator_of(strategy) is not None and reduction == "auto":
        if updates_of(strategy).are_local:
            return logs
        # Tensors of different devices would not travel together.
        with tf.device(strategy.extended.worker_devices[0]):
            values = tf.nest.map_structure(_log, logs)
        return strategy.reduce("MEAN", values, axis=None)
    if is_given(strategy) and reduction == "concat":
        # Keras splits them by the number of replicas, which it is told to be one.
        return tf.nest.map_structure(lambda part: strategy.gather(part, axis=0), logs)
    return original(logs, strategy, reduction)


def _log(value: Any) -> Any:
    """What can be reduced; `run` returns several local replicas' values as they are."""
    is_variable = isinstance(value, tf.Variable)
    if isinstance(value, compat.DistributedValues) and not is_variable:
        return value
    return tf.convert_to_tensor(value)


def logs_of_epoch(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Reads a metric's own variable, which some versions hand to the callbacks as it is.

    Where a rule leaves each step to its rank, this is where the ranks' logs become one.
    """
    if updates_of(model.distribute_strategy).are_local:
        with tf.device(model.distribute_strategy.extended.worker_devices[0]):
            values = tf.nest.map_structure(_log, logs)
        logs = model.distribute_strategy.reduce("MEAN", values, axis=None)
    return tf.nest.map_structure(
        lambda log: tf.convert_to_tensor(log) if hasattr(log, "assign") else log,
        original(model, logs),
    )


class _StepFunction:
    """Keras' function for one execution of its loop: a step, as `Communicator.step` has it."""

    def __init__(
        self,
        function: Callable[..., Any],
        communicator: Communicator,
        take: Callable[[Any], Any],
        finish: Callable[[Any, Any], Any],
    ) -> None:
        self._function = function
        self._communicator = communicator
        #: Prepares what the loop gives the function.
        self._take = take
        #: Gets what the loop gave, and the logs, and returns the logs.
        self._finish = finish

    def __call__(self, batches: Any) -> Any:
        with self._communicator.step():
            return self._finish(batches, self._function(self._take(batches)))

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # not yet there while it is copied
            raise AttributeError(name)
        return getattr(self._function, name)


def _as_it_is(batches: Any) -> Any:
    return batches


def _logs_as_they_are(batches: Any, logs: Any) -> Any:
    return logs


def make_step(
    name: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Makes each execution of a loop's function a step, and adopts the model's metrics."""
    strategy = model.distribute_strategy
    if not is_given(strategy):
        adopt(model.metrics_variables, strategy)
    elif getattr(model, name) is None:
        given.give_values_of_chief(model)
    original(model, *args, **kwargs)
    function = getattr(model, name)
    if not isinstance(function, _StepFunction):
        # Those of `sample_shares.make_function` are weighed.
        weighed = functools.partial(sample_shares.own_batches, strategy)
        take = _as_it_is if name == "predict_function" else weighed
        is_plain = name == "predict_function" or not is_given(strategy)
        finish = _logs_as_they_are if is_plain else functools.partial(given.logs_of_batch, model)
        setattr(model, name, _StepFunction(function, strategy.communicator, take, finish))
    return getattr(model, name)


def make_epochs(original: Callable[..., Any], epochs: Any, *args: Any, **kwargs: Any) -> None:
    """Makes Keras' iterator over epochs, or begins anew with it: where epochs end, all ranks do.

    Keras counts the batches of a dataset before it is divided. Where each rank has a dataset of its
    own, the batches are smaller ones, and some ranks have more of them; only the iterators know.
    """
    original(epochs, *args, **kwargs)
    _follow_iterators(epochs)


def enumerate_epoch(original: Callable[..., Any], epochs: Any, *args: Any, **kwargs: Any) -> Any:
    """The batches of an epoch, of which Keras takes no more than the first epoch had.

    Another epoch may deal out its elements otherwise, so that a rank has more batches in it.
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
    """Evaluates one model, and not that of each rank, where a rule lets them differ."""
    sync_model(model)
    # `fit` has divided what it validates, and its iterators say so.
    if kwargs.get(keras_names.CACHED_EVALUATION.name):
        return original(model, *args, **kwargs)
    with model.distribute_strategy.extended.whole_data():
        return original(model, *args, **kwargs)


def leave(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """An exception between two steps, such as a callback's, counts as a step that was left early.

    So a rank that leaves the loop alone does not begin another one with sums of the others' steps.
    """
    communicator = model.distribute_strategy.communicator
    with data_order.warning_once():
        try:
            return original(model, *args, **kwargs)
        except BaseException:
            with communicator.step():
                raise


def symbolic_build(
    original: Callable[..., Any], model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds from this replica's part of the first batch, where Keras takes the mean over all.

    Where Python makes the batches, as in a generator, it builds from what Keras knows of them.

    Only shapes and dtypes matter, and there is no mean of parts of different sizes, nor of strings.

    A model without `call`, such as a GAN, cannot be traced: only its own `train_step` knows which
    layers it calls, and with which parts of a batch. Without a strategy, Keras builds every model
    in its first step, and so it does here where the batch does not tell enough.
    """
    if is_given(model.distribute_strategy):
        return  # its variables belong to no strategy, so the first step builds it
    if type(model).call is sys.modules["keras"].Model.call:
        return
    if iterator is not None:
        data_batch = _example(iterator)
    if data_batch is None:
        return
    with falls_back(_BUILD, "the first step builds it, as in one process"):
        original(model, data_batch=data_batch)


@falls_back(_BUILD, "the first step builds it, as in one process")
def _example(iterator: Any) -> Any:
    """A batch of this replica, or what is known of it; None where there is none."""
    adapter = getattr(iterator, "data_adapter", None)
    signature = keras_names.OUTPUT_SIGNATURE.of(adapter, None)
    if signature is not None:
        # What a generator has given, also ahead of the first batch, it does not give again.
        return signature
    # In older versions the iterator itself cannot be iterated.
    epoch = iterator if hasattr(iterator, "__iter__") else iterator.enumerate_epoch()
    for *_, batches in epoch:
        batch = next(batches, None)
        if batch is None:
            # An epoch without steps, as the rest of one whose last step was committed. All
            # ranks read the metrics at its end, so a rank that has just joined builds them.
            return _element_spec(iterator)
        # Its shapes are those of a batch with samples.
        return empty_batches.with_row(compat.select_replica(0, batch))
    return None


def _element_spec(iterator: Any) -> Any:
    """What a batch of one replica would be, or None where shapes are not known."""
    spec = compat.spec_of_replica(keras_names.EPOCHS_DATASET.of(iterator).element_spec)
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(spec)]
    return None if any(shape is None or shape.rank is None for shape in shapes) else spec
