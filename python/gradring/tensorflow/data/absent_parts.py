"""Parts of batches that are absent: optional inputs of a model, for which a program gives None.

Keras makes empty optionals of them, which cannot be divided among ranks. Here they are None, as
Keras' step has them, until they reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: What Keras says of an input that is None.
_OF_NONE = (tf.OptionalSpec(None), tf.OptionalSpec(tf.NoneTensorSpec()))


def as_none(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset, with None for optionals that never have a value; itself if it has none."""
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
    """Lets a rank without samples of a batch have None where the others have it."""
    compat.replace({"input_lib._dummy_tensor_fn": _dummies})


def _dummies(original: Callable[..., Any], value_structure: Any) -> Any:
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.NoneTensorSpec) else original(spec),
        value_structure,
    )
