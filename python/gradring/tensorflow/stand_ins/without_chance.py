"""Removal of randomness for `gradring verify`: seeds, shuffles, noise and random layers.

One process and several ranks draw random numbers of different shapes, and in different order. So
two trainings can be compared only without randomness. Numbers drawn before the training, such as
data and initial weights, follow the seeds of `gradring_start.chance`. In steps, dropout keeps every
element, random layers run as in inference, and noise is equal for all samples of a batch. Shuffles
have a fixed order.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring_start.chance import rank

#: TensorFlow's default global seed, for operations with a seed of their own.
_DEFAULT_SEED = 87654321
#: Seed of the shuffles and of the noise.
_SEED = 20
#: Layers that are random in training only, besides those whose names begin with Random.
_LAYERS = ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise")


def install() -> None:
    """Replaces TensorFlow's random functions by deterministic ones."""
    tf.random.set_seed(_DEFAULT_SEED)
    # Sessions of TensorFlow 1 take the seed of their graph.
    tf.compat.v1.get_default_graph().seed = _DEFAULT_SEED + 1000 * rank()
    for owner, name in (
        (tf.random, "set_seed"),
        (tf.compat.v2.random, "set_seed"),
        (tf.compat.v1.random, "set_random_seed"),
        (tf.compat.v1, "set_random_seed"),
    ):
        setattr(owner, name, _noted(getattr(owner, name)))
    for module in (tf.nn, tf.compat.v2.nn, tf.compat.v1.nn):
        _put(module, "dropout", _identity)
        if hasattr(module, "experimental"):
            _put(module.experimental, "stateless_dropout", _identity)
    for module in (tf.random, tf.compat.v2.random, tf.compat.v1.random):
        _put(module, "shuffle", _shuffled)
    _share_noise(tf.random)
    for owner, name in (
        (tf.data.Dataset, "shuffle"),
        *((tf.random, name) for name in ("normal", "uniform", "truncated_normal")),
    ):
        _seed_each(owner, name)


def silence_layers(keras: Any) -> None:
    """Makes random layers of Keras or tf_keras run as in inference, even in training."""
    for name, kind in vars(keras.layers).items():
        if name in _LAYERS or (name.startswith("Random") and isinstance(kind, type)):
            _put(kind, "call", _without_training(kind.call))
    if hasattr(keras, "random"):
        _share_noise(keras.random)


def _share_noise(module: Any) -> None:
    stateless = {
        "normal": tf.random.stateless_normal,
        "truncated_normal": tf.random.stateless_truncated_normal,
        "uniform": tf.random.stateless_uniform,
    }
    for name, draw in stateless.items():
        _put(module, name, _noise(getattr(module, name), draw))


def _put(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, tf.autograph.experimental.do_not_convert(function))


def _identity(x: Any, *_: Any, **__: Any) -> Any:
    return tf.identity(x)


def _shuffled(value: Any, *_: Any, **__: Any) -> Any:
    """Shuffles as `tf.random.shuffle`, into a fixed order for each number of rows."""
    value = tf.convert_to_tensor(value)
    drawn = tf.random.stateless_uniform(tf.shape(value)[:1], [_SEED, 0], None, None, tf.int64)
    return tf.gather(value, tf.argsort(drawn))


def _without_training(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(layer: Any, inputs: Any, *_: Any, **kwargs: Any) -> Any:
        return original(layer, inputs, **{**kwargs, "training": False})

    return call


def _noise(original: Callable[..., Any], stateless: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a random function; inside of a `tf.function`, it draws one row for all samples.

    The first dimension of a batch's noise differs between one process and several ranks.
    """

    @functools.wraps(original)
    def draw(shape: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function():
            return original(shape, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in ("seed", "name")}
        shape = tf.convert_to_tensor(shape, tf.int32)
        row = tf.concat([tf.ones_like(shape[:1]), shape[1:]], 0)
        return tf.broadcast_to(stateless(row, [_SEED, 0], *args[:3], **given), shape)

    return draw


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `set_seed`; notes that the program has set one seed for all ranks."""

    @functools.wraps(original)
    def set_seed(value: Any) -> None:
        global _is_seeded
        _is_seeded = value is not None
        original(value)

    return set_seed


def _seed_each(owner: Any, name: str) -> None:
    """Gives each call without a seed its own one, numbered in the order of calls.

    TensorFlow's own seed would depend on the number of earlier operations. The seeds differ between
    ranks, unless the program sets TensorFlow's global seed.
    """
    original, made = getattr(owner, name), itertools.count(1)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("seed") is None and not tf.inside_function():
            given.arguments["seed"] = next(made) + (0 if _is_seeded else 1000 * rank())
        return original(*given.args, **given.kwargs)

    setattr(owner, name, seeded)


#: True if the program has set TensorFlow's global seed.
_is_seeded = False
