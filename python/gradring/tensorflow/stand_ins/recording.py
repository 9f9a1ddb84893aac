"""The recorder of optimizer steps, for `gradring verify`.

If ``GRADRING_VERIFY=DIRECTORY`` is set, as by `gradring verify`, the start hook (`gradring_start`)
calls `install` after the import of TensorFlow, and `record_keras` and `record_tf_keras` after those
of Keras and tf_keras. The variables are read before and after each update by an optimizer; a Python
function gets both values, in graphs too. `gradring.records.trainings` says what is kept.

The first process of a rank that imports TensorFlow makes the rank's folder, and records. Programs
that this process starts find the folder, and record nothing.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import tensorflow as tf

from gradring.clusters import tf_config
from gradring.gradients.names import name_of
from gradring.group.communicator import open_groups
from gradring.records import trainings
from gradring.tensorflow.graph.adoption import of_tensorflow
from gradring.tensorflow.graph.context import holding
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras import compat_keras
from gradring.tensorflow.rules.parameter_server import connected
from gradring.tensorflow.seams import keras_names
from gradring.tensorflow.stand_ins import without_chance
from gradring_start import VERIFY
from gradring_start.chance import has_drawn, rank

#: Longest time that a finished rank waits for the others.
_PATIENCE_S = 60.0
_LOOK_S = 0.01
#: Most elements of a variable that no optimizer updates; larger ones, such as frozen tables, are
#: not read.
_LARGEST_OF_STATE = 2**20

#: True while an optimizer applies gradients; an optimizer inside of it belongs to the same step.
_is_applying: ContextVar[bool] = ContextVar("is_applying", default=False)


def install(_: Any) -> None:
    """Begins to record; replaces the optimizers of TensorFlow 1, and random functions.

    A parameter server records nothing, because its workers record the steps.
    """
    global _recorder
    if tf_config.servers_in(os.environ).own is not None:
        return
    try:
        _recorder = _Recorder(Path(os.environ[VERIFY]))
    except FileExistsError:
        return
    without_chance.install()
    logging.getLogger("gradring").addHandler(_Warnings(_recorder))
    _without_xla()
    _note_batches(_recorder.facts)
    _record(tf.compat.v1.train.Optimizer, "apply_gradients", _pairs, returns_op=True)
    # TensorFlow may have imported Keras before the start hook could see it.
    keras = sys.modules.get("keras")
    if hasattr(keras, "optimizers"):
        record_keras(keras)


def record_keras(keras: Any) -> None:
    """Records optimizers of Keras 3, and makes its random layers deterministic."""
    global _records_keras
    if _recorder is None or _records_keras or keras.backend.backend() != "tensorflow":
        return
    _records_keras = True
    # Repair first: a later replacement would wrap the recorder, and change weights after it.
    compat_keras.repair()
    without_chance.silence_layers(keras)
    _record(keras.optimizers.Optimizer, "apply", _lists)
    _record(keras.optimizers.LossScaleOptimizer, "apply", _lists)
    _record_states(keras.callbacks.CallbackList)


def record_tf_keras(tf_keras: Any) -> None:
    """Records optimizers of tf_keras, and makes its random layers deterministic."""
    if _recorder is None:
        return
    compat_keras.repair()
    without_chance.silence_layers(tf_keras)
    optimizers = tf_keras.optimizers
    _record(optimizers.Optimizer, "apply_gradients", _pairs)
    _record(optimizers.legacy.Optimizer, "apply_gradients", _pairs)
    _record_states(tf_keras.callbacks.CallbackList)


def _without_xla() -> None:
    """Turns XLA off, because XLA cannot call the recorder's Python function."""
    original = tf.function

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("jit_compile", None)
        return original(*args, **kwargs)

    tf.function = function


def _note_batches(facts: trainings.Facts) -> None:
    """Notes the batch sizes of a program's datasets, and into how many parts it divides them."""
    for name, argument, numbers in (
        ("batch", "batch_size", facts.batches),
        ("shard", "num_shards", facts.shards),
    ):
        method = _noting(getattr(tf.data.Dataset, name), argument, numbers)
        setattr(tf.data.Dataset, name, method)


def _noting(original: Callable[..., Any], argument: str, numbers: list[int]) -> Callable[..., Any]:
    """Returns a method of datasets that notes its first argument, if that is a number."""

    @functools.wraps(original)
    def method(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        number = args[0] if args else kwargs.get(argument)
        if isinstance(number, int):
            numbers.append(number)
        return original(dataset, *args, **kwargs)

    return method


class _Warnings(logging.Handler):
    """Notes gradring's warnings, which may explain a difference between trainings."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a warning, in the process that records."""
        self._recorder.warned(record.getMessage())


# Variables that no optimizer updates


def _record_states(callbacks: Any) -> None:
    """Makes `fit` record these variables before its first batch, and after each batch."""

    def recorded(name: str, is_begin: bool) -> None:
        original = getattr(callbacks, name)

        @functools.wraps(original)
        def note(those: Any, *args: Any, **kwargs: Any) -> Any:
            if _recorder is not None and (model := getattr(those, "model", None)) is not None:
                _recorder.note_state(model, is_begin)
            return original(those, *args, **kwargs)

        setattr(callbacks, name, note)

    recorded("on_train_batch_begin", True)
    recorded("on_train_batch_end", False)


def _state_of(model: Any, updated: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields names and values of a model's variables, except those with an `id` in `updated`."""
    for place, variable in enumerate(model.weights):
        own = of_tensorflow(variable)
        # Reading a variable of a strategy may be a collective, so its first copy is read.
        own = getattr(own, "values", (own,))[0]
        if id(variable) in updated or not own.dtype.is_floating:
            continue
        if own.shape.num_elements() <= _LARGEST_OF_STATE:
            yield f"{place}/{name_of(variable)}", own.numpy()


# Updates

#: Arguments of an optimizer's method as lists instead of iterators, its gradients and variables.
_Call = tuple[tuple[Any, ...], Sequence[Any], Sequence[Any]]


def _lists(optimizer: Any, grads: Any, trainable_variables: Any = None) -> _Call:
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    known = trainable_variables
    if known is None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        known = list(keras_names.TRAINED.of(inner, ()) or ())
    return (grads, trainable_variables), grads, known


def _pairs(_: Any, grads_and_vars: Any) -> _Call:
    pairs = list(grads_and_vars)
    return (pairs,), [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _record(
    kind: type, method: str, read: Callable[..., _Call], *, returns_op: bool = False
) -> None:
    original = getattr(kind, method)
    parameters = ("grads_and_vars",) if read is _pairs else ("grads", "trainable_variables")

    @functools.wraps(original)
    def recorded(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        own = {name: kwargs.pop(name) for name in parameters if name in kwargs}
        own |= dict(zip(parameters, args, strict=False))
        arguments, gradients, variables = read(optimizer, **own)
        arguments += args[len(parameters) :]
        if _is_applying.get() or not _is_first_replica() or not variables:
            return original(optimizer, *arguments, **kwargs)
        norms = [_norm(gradient) for gradient in gradients]
        before = [_value(variable) for variable in variables]
        with holding(_is_applying, True), tf.control_dependencies([*norms, *before]):
            result = original(optimizer, *arguments, **kwargs)
        with tf.control_dependencies([result] if _is_graph_op(result, returns_op) else []):
            done = _note(optimizer, variables, norms, before)
        return tf.group(result, done) if _is_graph_op(result, returns_op) else result

    setattr(kind, method, tf.autograph.experimental.do_not_convert(recorded))


def _is_graph_op(result: Any, returns_op: bool) -> bool:
    return returns_op and not tf.executing_eagerly() and result is not None


def _is_first_replica() -> bool:
    """Returns whether this is the first replica of this process."""
    context = tf.distribute.get_replica_context()
    if context is None or not tf.distribute.has_strategy():
        return True
    replica = context.replica_id_in_sync_group
    local = len(context.strategy.extended.worker_devices)
    return not isinstance(replica, int) or replica % local == 0


def _value(variable: Any) -> Any:
    if isinstance(variable, tf.Variable) and variable.dtype != variable.dtype.base_dtype:
        # A reference, as of TensorFlow 1: its tensor is the memory that changes.
        return tf.raw_ops.DeepCopy(x=variable.read_value())
    return tf.identity(tf.convert_to_tensor(variable))


def _norm(gradient: Any) -> Any:
    if gradient is None:
        return tf.constant(-1.0, tf.float64)
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.norm(tf.cast(tf.convert_to_tensor(values), tf.float64))


def _note(
    optimizer: Any, variables: Sequence[Any], norms: Sequence[Any], before: Sequence[Any]
) -> Any:
    """Records the values of a step, now or whenever the graph runs."""
    assert _recorder is not None
    _recorder.updated.update(map(id, variables))
    note = functools.partial(_recorder.note, optimizer, [name_of(each) for each in variables])
    values = [*norms, *before, *(_value(variable) for variable in variables)]
    if tf.executing_eagerly():
        note(*(value.numpy() for value in values))
        return None
    return tf.numpy_function(note, values, [])


class _Recorder:
    """Writes the steps of this process, and the `facts` of its program."""

    def __init__(self, directory: Path) -> None:
        """Makes the folder of this rank.

        Raises:
            FileExistsError: Another process of the rank has made it.
        """
        self._directory, self._process = directory, os.getpid()
        self._place = trainings.folder(directory, rank())
        self._place.mkdir()
        self._limit = trainings.limit_of(directory)
        self._lock = threading.Lock()
        self._steps = 0
        self._numbers: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._made = itertools.count()
        self._states, self._begun = 0, WeakSet[Any]()
        self.facts = trainings.Facts()
        #: Variables that an optimizer updates, by `id`.
        self.updated: set[int] = set()

    def warned(self, text: str) -> None:
        """Records a warning of gradring, once."""
        if os.getpid() == self._process and text not in self.facts.warnings:
            self.facts.warnings.append(text)
            trainings.write_facts(self._place, self.facts)

    def note_state(self, model: Any, is_begin: bool) -> None:
        """Records the variables that no optimizer updates, around a batch of `fit`.

        Args:
            model: The model in `fit`.
            is_begin: True before a batch, which is recorded only for the model's first batch.
        """
        if os.getpid() != self._process or (is_begin and model in self._begun):
            return
        with self._lock, falls_back("the record of other variables", "they are not compared"):
            self._begun.add(model)
            named = dict(_state_of(model, self.updated))
            values = [trainings.sketch(value) for value in named.values()]
            state = trainings.State(self._steps, list(named), values)
            trainings.write_state(self._place, self._states, state)
            self._states += 1

    def note(self, optimizer: Any, names: list[str], *values: Any) -> None:
        """Records a step of an optimizer.

        Args:
            optimizer: Optimizer of the step.
            names: Names of its variables.
            *values: The norm of each gradient, then the variables before and after the step.
        """
        if os.getpid() != self._process:  # a fork
            return
        count = len(names)
        with self._lock:
            if optimizer not in self._numbers:
                self._numbers[optimizer] = [next(self._made), 0]
            of_optimizer = self._numbers[optimizer]
            number, done = of_optimizer
            of_optimizer[1] += 1
            if not done:
                self._record_facts()
            step = trainings.Step(
                number,
                type(optimizer).__name__,
                done,
                names,
                [float(value) for value in values[:count]],
                _bytes_sent(),
                [trainings.sketch(value) for value in values[count : 2 * count]],
                [trainings.sketch(value) for value in values[2 * count :]],
            )
            trainings.write_step(self._place, self._steps, step)
            self._steps += 1
            if self._steps == self._limit:
                self._stop()

    def _record_facts(self) -> None:
        """Records layers, compute dtypes and numpy's random state at an optimizer's first step."""
        packages: list[Any] = [sys.modules.get(name) for name in ("keras", "tf_keras")]
        bases = tuple(each.layers.Layer for each in packages if hasattr(each, "layers"))
        # `type` instead of `isinstance`: some proxies raise errors for their `__class__`.
        layers = [each for each in gc.get_objects() if issubclass(type(each), bases)]
        facts = self.facts
        facts.layers = sorted({base.__name__ for each in layers for base in type(each).__mro__})
        facts.compute = sorted({str(getattr(each, "compute_dtype", "")) for each in layers})
        if has_drawn(np) and not facts.numbers:
            state = repr(np.random.get_state())
            facts.numbers = hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
        trainings.write_facts(self._place, facts)

    def _stop(self) -> None:
        """Ends the process once all ranks are here; a rank that left earlier would fail others.

        The program's own end is skipped, because it assumes a complete training.
        """
        self.facts.stopped = True
        trainings.write_facts(self._place, self.facts)
        (self._place / "done").touch()
        ranks = range(int(os.environ.get("GRADRING_WORLD_SIZE") or 1))
        files = [trainings.folder(self._directory, rank) / "done" for rank in ranks]
        deadline = time.monotonic() + _PATIENCE_S
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


_recorder: _Recorder | None = None
_records_keras = False


def _bytes_sent() -> int | None:
    """Returns the bytes sent to other ranks and to parameter servers; None without either."""
    groups = [group for group in open_groups if group.world_size > 1]
    served = [int(rule.stats()["bytes_sent"]) for rule in connected]
    if not groups and not served:
        return None
    return sum(served) + sum(
        int(each["bytes_sent"]) for it in groups for each in it.stats()["collectives"].values()
    )
