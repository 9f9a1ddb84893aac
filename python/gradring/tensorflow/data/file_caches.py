"""Names of cache files that differ by rank.

TensorFlow writes `dataset.cache(filename)` to the program's file name. Ranks on one machine would
race for that file. A cache from a run with another number of ranks has elements that belong to
other ranks now. So the rank, the number of ranks and the way of sharding are added to the name.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.config.parse import Place
from gradring.tensorflow.data import made as making
from gradring.tensorflow.data.made import Made, how
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.fallback import falls_back

_FILENAME = "filename"


@falls_back("the names of caches in files", "ranks of one machine may write the same file")
def _renamed(dataset: tf.data.Dataset, suffix: str) -> tf.data.Dataset | None:
    if not making.read(dataset):
        return None
    variant = compat.variant_of(dataset)
    own = _made_with(variant, suffix, {})
    if own is variant:
        return None
    remade = compat.variant_dataset(own, dataset.element_spec).with_options(dataset.options())
    # The new dataset keeps objects alive that Python code in the pipeline needs.
    remade._gradring_needs = dataset
    return remade


def own(dataset: tf.data.Dataset, place: Place, sharding: str = "") -> tf.data.Dataset:
    """Returns the dataset with this rank's own cache files; the dataset itself without any.

    Args:
        dataset: A `tf.data.Dataset` that is about to be distributed.
        place: Rank and number of the processes that divide the elements.
        sharding: Name of the way of sharding; default: the name of the dataset's policy.
    """
    if place.world_size == 1:
        return dataset
    policy = dataset.options().experimental_distribute.auto_shard_policy
    sharding = sharding or policy.name.lower()
    suffix = f".{sharding}-rank-{place.rank}-of-{place.world_size}"
    return _renamed(dataset, suffix) or dataset


def _made_with(value: Any, suffix: str, met: dict[int, Any]) -> Any:
    """Returns a variant, or an argument of an op, with the suffix added to names of cache files."""
    if isinstance(value, list | tuple):
        return type(value)(_made_with(each, suffix, met) for each in value)
    made = how(value)
    if made is None:
        return value
    if id(value) not in met:
        arguments = {name: _made_with(it, suffix, met) for name, it in made.arguments.items()}
        if _caches_in_a_file(made):
            arguments[_FILENAME] = tf.strings.join([made.arguments[_FILENAME], suffix])
        met[id(value)] = made.again(value, arguments)
    return met[id(value)]


def _caches_in_a_file(made: Made) -> bool:
    is_cache = made.by.__name__.lower().replace("_", "") in ("cachedataset", "cachedatasetv2")
    return is_cache and bool(tf.get_static_value(tf.convert_to_tensor(made.arguments[_FILENAME])))
