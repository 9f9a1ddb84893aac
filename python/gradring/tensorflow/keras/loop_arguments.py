"""Check of the arguments of `fit`, `evaluate` and `predict`, before the loop begins.

Without the comparison, ranks with different arguments would meet in different steps, and the error
would name a collective that the user has never called. The comparison also finds a rank that calls
the loop alone, and its error names the loop. Data may differ between ranks, and so may arguments
that only affect the display.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError, GradringError
from gradring.group.require_equal import require_equal
from gradring.tensorflow.graph.adoption import is_given, replicas_of
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras.given import DIVIDED, UNEQUAL_ROWS
from gradring.tensorflow.seams import keras_names

#: Arguments that decide the number of collectives, or the training's result.
_COMPARED = (
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "steps",
    "validation_split",
    "validation_steps",
    "validation_freq",
    "class_weight",
)
#: Arguments that are compared for arrays only; a dataset has its own batch size and order.
_OF_ARRAYS = ("batch_size", "validation_batch_size", "shuffle")
#: Batch size that Keras uses for `batch_size=None`.
_BATCH_SIZE = 32
#: Arguments compared only by whether they are None.
_GIVEN = ("validation_data", "sample_weight")
#: Class names of callbacks that change the weights of their rank, or call collectives. Any other
#: callback may be on some ranks only, such as `ModelCheckpoint` or `TensorBoard`. Learning rates
#: set by callbacks are compared at the end of each epoch.
_ON_EVERY_RANK = (
    "CheckReplicas",
    "CommitState",
    "PreemptionCheckpoint",
    "SwapEMAWeights",
)
#: Packages of these callbacks; a program may have its own classes of the same names.
_PACKAGES = ("keras", "tf_keras", "gradring")
_BEST_WEIGHTS = "EarlyStopping(restore_best_weights=True)"
#: Characters of a value that an error shows.
_SHOWN = 60
_REMEDY = "give every rank the same arguments, and callbacks that change the training"


def compared(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a loop of Keras; first compares its arguments between the ranks.

    Raises:
        gradring.errors.ConfigError: The loop failed, and the static shape of an input has the batch
            size of all ranks. Or tensors of a batch that is divided have different numbers of rows.
        gradring.errors.MismatchError: The ranks have different arguments.
    """
    communicator = model.distribute_strategy.communicator
    # `fit` has already compared the arguments of its validation.
    if communicator.world_size > 1 and not kwargs.get(keras_names.CACHED_EVALUATION.name):
        loop = original.__name__
        try:
            given = inspect.signature(original).bind(model, *args, **kwargs)
        except TypeError:  # the original raises an error that names the wrong argument
            return original(model, *args, **kwargs)
        given.apply_defaults()
        own: dict[str, str] | None = None
        whole: int | None = None
        with falls_back("the comparison of the arguments of loops", "each rank takes its own"):
            own = _own(given.arguments)
            whole = _whole_static_batch(model, given.arguments)
        require_equal(communicator, own, of=loop, remedy=_REMEDY)
        return _explained(original, model, whole, *args, **kwargs)
    return original(model, *args, **kwargs)


def _explained(
    original: Callable[..., Any], model: Any, whole: int | None, *args: Any, **kwargs: Any
) -> Any:
    """Calls a loop, and names the cause if it fails because batches are divided."""
    try:
        return original(model, *args, **kwargs)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        cause = None if isinstance(error, GradringError) else _cause_of(error, model, whole)
        if cause is None:
            _note_parts(error, model)
            raise
        communicator = model.distribute_strategy.communicator
        rank, host = communicator.rank, communicator.host
        raise ConfigError(
            f"{original.__name__} of the model {model.name!r} failed on rank {rank} of {host}. "
            f"{cause}",
            rank=rank,
            host=host,
        ) from error


def _cause_of(error: Exception, model: Any, whole: int | None) -> str | None:
    """Returns what a loop's error says of the division of batches, or None.

    Args:
        error: An error of Keras or TensorFlow.
        model: The model, which perhaps takes whole batches only, such as one with a state.
        whole: The batch size, if an input has it as a static shape.
    """
    if UNEQUAL_ROWS in str(error):
        return f"Some {UNEQUAL_ROWS}; {DIVIDED}"
    if whole is None:
        return None
    replicas = replicas_of(model.distribute_strategy)
    part = -(-whole // replicas)
    if not all(re.search(rf"\b{size}\b", str(error)) for size in (whole, part)):
        return None
    return (
        f"An input has the static batch size {whole}, and each of {replicas} replicas gets a part "
        f"of a batch, of {part} samples. Make the input with that size, or without a batch size"
    )


def _note_parts(error: Exception, model: Any) -> None:
    """Adds to an error of shapes in a step that it gets a part of a batch; needs Python 3.11."""
    text = str(error)
    is_of_shapes = re.search("shape|dimension|incompatible", text, re.IGNORECASE)
    is_of_data = "IteratorGetNext" in text
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    functions = (getattr(frame.f_code, "co_qualname", "") for frame in frames)
    if not is_of_shapes or is_of_data or not hasattr(error, "add_note"):
        return
    if "_StepFunction.__call__" in functions:
        strategy = model.distribute_strategy
        whole = ". If the rows of a batch are no samples, train by train_on_batch, which leaves "
        error.add_note(
            f"gradring divides each batch among {replicas_of(strategy)} replicas, so a step gets "
            "fewer rows than the batch has. If the step needs a number of samples, take it from "
            f"the batch, as by tf.shape(x)[0]{f'{whole}such a batch whole' * is_given(strategy)}"
        )


def _whole_static_batch(model: Any, given: Mapping[str, Any]) -> int | None:
    """Returns the batch size of arrays, if an input has the same one as a static shape."""
    if not _is_array(given.get("x")) or "batch_size" not in given:
        return None
    size = given["batch_size"] or _BATCH_SIZE
    shapes = [getattr(it, "shape", None) for it in tf.nest.flatten(getattr(model, "inputs", None))]
    return size if any(shape and shape[0] == size for shape in shapes) else None


def _own(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the arguments that must be equal on all ranks, as text by name."""
    has_arrays = _is_array(given.get("x")) or _is_array(given.get("validation_data"))
    names = (*_COMPARED, *_OF_ARRAYS) if has_arrays else _COMPARED
    if has_arrays and "batch_size" in given:
        size = _BATCH_SIZE if given["batch_size"] is None else given["batch_size"]
        of_validation = given.get("validation_batch_size")
        given = {
            **given,
            "batch_size": size,
            "validation_batch_size": size if of_validation is None else of_validation,
        }
    own = {name: _shown(given[name]) for name in names if name in given}
    for name in _GIVEN:
        if name in given:
            own[name] = "None" if given[name] is None else "given"
    if "epochs" in given:
        kinds = [kind for each in _callbacks(given.get("callbacks")) for kind in _kinds_of(each)]
        for kind in (*_ON_EVERY_RANK, _BEST_WEIGHTS):
            own[f"callbacks {kind}"] = str(kinds.count(kind))
    return own


def _callbacks(given: Any) -> Iterator[Any]:
    """Yields the callbacks of a single callback, a list or a `CallbackList`."""
    yield from tf.nest.flatten(getattr(given, "callbacks", given))


def _kinds_of(callback: Any) -> Iterator[str]:
    kinds = type(callback).__mro__
    names = {it.__name__ for it in kinds if it.__module__.partition(".")[0] in _PACKAGES}
    yield from names.intersection(_ON_EVERY_RANK)
    if "EarlyStopping" in names and getattr(callback, "restore_best_weights", False):
        yield _BEST_WEIGHTS


def _is_array(data: Any) -> bool:
    """Returns whether data is an array or a tensor, or a nest whose first leaf is one."""
    while isinstance(data, list | tuple | Mapping) and data:
        data = next(iter(data.values() if isinstance(data, Mapping) else data))
    return hasattr(data, "shape")


def _shown(value: Any) -> str:
    """Returns a value as text: equal values have equal texts on all ranks."""
    text = _text(value)
    if len(text) <= _SHOWN:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_SHOWN]}... (hash {digest})"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_text(k)}: {_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, Real):
        # Numbers of different types are equal texts, even if they differ by rounding.
        return f"{float(value):.6g}"
    # The texts of other objects may contain their addresses.
    return str(value) if value is None or isinstance(value, str) else type(value).__name__
