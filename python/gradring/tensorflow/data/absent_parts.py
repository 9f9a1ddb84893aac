"""Absent parts of batches: optional inputs of a model, for which a program passes None.

Keras turns them into empty optionals, which cannot be divided among ranks. This module makes them
None again, the value that Keras' step finally gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Specs that Keras gives to an input that is None.
_OF_NONE = (tf.OptionalSpec(None), tf.OptionalSpec(tf.NoneTensorSpec()))


def as_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with None for optionals that never have a value; itself without any."""
    if not any(map(_is_absent, tf.nest.flatten(dataset.element_spec))):
        return dataset
    specs = dataset.element_spec

    def without(*parts: Any) -> Any:
        pairs = zip(tf.nest.flatten(specs), tf.nest.flatten(parts), strict=True)
        leaves = [None if _is_absent(spec) else leaf for spec, leaf in pairs]
        return tf.nest.pack_sequence_as(specs, leaves)

    return dataset.map(tf.autograph.experimental.do_not_convert(without))


def _is_absent(spec: Any) -> bool:
    return isinstance(spec, tf.OptionalSpec) and spec in _OF_NONE


def let_be_empty() -> None:
    """Gives a rank without samples of a batch None in the places where other ranks have None."""
    compat.replace({"input_lib._dummy_tensor_fn": _dummies})


def _dummies(original: Callable[..., Any], value_structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.NoneTensorSpec) else original(spec),
        value_structure,
    )
