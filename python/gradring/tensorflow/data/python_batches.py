"""Comparison of whole batches that Python code makes, such as those of generators.

Every rank makes whole batches, and keeps its part of each (`data_order`). TensorFlow's own ops have
the same seeds on all ranks. Python code can draw others, read files in another order, or yield only
its rank's share. Then some samples belong to several parts, and others to none.

So each rank notes hashes of the batches 1, 2, 4, 8, and so on, of the passes 1, 2, 4, 8, and so on.
Loops of Keras compare them. Random augmentation also makes batches differ, but not their labels. So
batches count as different only if all of their tensors differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gradring.gradients.replicas import hash_of
from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.data.data_order import COMPARED_ELEMENTS
from gradring.tensorflow.graph import apart, compat
from gradring.tensorflow.graph.fallback import falls_back

_COMPARISON = "the comparison of batches that Python code makes"
_WITHOUT = "each rank takes its part of its own batches"

_POLICIES = tf.data.experimental.AutoShardPolicy

#: Number of hashes of strings.
_BUCKETS = 2**62

#: A hash for each tensor of a batch; None for one whose rows are equal, which shows no order.
_Hashes: TypeAlias = "list[int | None]"


class PythonBatches:
    """Hashes of the batches of a strategy's datasets."""

    def __init__(self) -> None:
        """Begins without a dataset."""
        #: True once any rank has divided a dataset with Python code.
        self._are_noted = False
        self._compares = True
        self._datasets = 0
        #: Hashes by the numbers of dataset, pass and batch, all from 1.
        self._noted: dict[tuple[int, int, int], _Hashes] = {}

    def noted(
        self, dataset: tf.data.Dataset, ops: Set[str], communicator: Communicator
    ) -> tf.data.Dataset:
        """Returns the dataset, which notes its batches if Python code makes them.

        All ranks must call it.

        Args:
            dataset: A `tf.data.Dataset` of global batches.
            ops: The types of ops in its functions, and of the datasets that it reads from.
            communicator: The ranks that divide the batches.
        """
        has_joined = communicator.generation > 0  # and knows no batches of others, in `compare`
        if communicator.world_size == 1 or has_joined or not tf.executing_eagerly():
            return dataset
        is_noted = bool(compat.PYTHON_OPS & ops) and _is_divided(dataset, ops)
        found = np.array([is_noted], np.int64)
        communicator.all_reduce(found, "max", name="datasets of Python code")
        self._are_noted |= bool(found[0])
        self._datasets += 1
        if is_noted:
            with falls_back(_COMPARISON, _WITHOUT):
                return _with_hashes(dataset, self._note(self._datasets))
        return dataset

    def compare(self, communicator: Communicator) -> None:
        """Warns on rank 0, once, if the ranks have made other batches; all ranks must call it.

        Raises:
            gradring.errors.ConfigError: The batches differ in the group of a strict strategy.
        """
        if not (self._are_noted and self._compares) or communicator.generation > 0:
            return
        # Threads of datasets add to it.
        noted = self._noted.copy()
        items = [[*key, hashes] for key, hashes in sorted(noted.items())]
        texts = gather_if_different(communicator, json.dumps(items).encode(), "batches of Python")
        if texts is None:
            return
        ranks = [{(a, b, c): hashes for a, b, c, hashes in json.loads(each)} for each in texts]
        # A rank may have read ahead of others.
        for key in sorted(set[Any](ranks[0]).intersection(*ranks)):
            if any(_differ(ranks[0][key], each[key]) for each in ranks):
                self._compares = False
                apart.tell(
                    communicator,
                    f"batch {key[2]} of pass {key[1]} over a dataset of Python code differs "
                    f"between the ranks. {_OTHER_BATCHES}",
                )
                return

    def _note(self, dataset: int) -> Any:
        passes = 0

        def note(index: Any, *samples: Any) -> Any:
            nonlocal passes
            batch = int(index) + 1
            passes += batch == 1
            if is_due(passes) and is_due(batch):
                with falls_back(_COMPARISON, _WITHOUT):
                    self._noted[dataset, passes, batch] = list(map(_hash, samples))
            return np.int64(0)

        return note


_OTHER_BATCHES = (
    "Each trains on its part of its own batch, so some samples count several times, and others "
    "never. Make all batches on every rank, in one order (equal seeds, no division by rank), and "
    "let gradring divide them"
)


def _with_hashes(dataset: tf.data.Dataset, note: Any) -> tf.data.Dataset:
    def with_hash(index: tf.Tensor, element: Any) -> Any:
        samples = list(_samples(element))
        done = tf.numpy_function(note, [index, *samples], tf.int64)
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(_identity, element, expand_composites=True)

    unconverted = tf.autograph.experimental.do_not_convert(with_hash)
    return dataset.enumerate().map(unconverted).with_options(dataset.options())


def _identity(leaf: Any) -> Any:
    return None if leaf is None else tf.identity(leaf)


def _samples(element: Any) -> Iterator[tf.Tensor]:
    """Yields a sample of the rows of each dense tensor that has a batch dimension."""
    for leaf in tf.nest.flatten(element):
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0 or leaf.dtype == tf.variant:
            continue
        if leaf.dtype == tf.string:
            leaf = tf.strings.to_hash_bucket_fast(leaf, _BUCKETS)
        rows = tf.reshape(leaf, [tf.shape(leaf)[0], -1])
        columns = tf.maximum(1, COMPARED_ELEMENTS // tf.maximum(1, tf.shape(rows)[0]))
        yield rows[:, :: tf.maximum(1, tf.shape(rows)[1] // columns)]


def _is_divided(dataset: tf.data.Dataset, ops: Set[str]) -> bool:
    """Returns whether each rank takes its part of each batch, and not whole files."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    reads_files = any("Record" in op or "TextLine" in op for op in ops)
    return policy == _POLICIES.DATA or (policy == _POLICIES.AUTO and not reads_files)


def _hash(rows: np.ndarray[Any, Any]) -> int | None:
    """Returns a hash of some rows; None if all are equal, as labels may be."""
    shows_order = len(rows) == 1 or (rows != rows[:1]).any()
    return hash_of(rows) if shows_order else None


def is_due(number: int) -> bool:
    """Returns whether the ranks compare after so many batches: after 1, 2, 4, 8, and so on."""
    return number > 0 and number & (number - 1) == 0


def _differ(own: _Hashes, other: _Hashes) -> bool:
    """Returns whether all tensors of two batches differ, as far as they show an order."""
    pairs = [pair for pair in zip(own, other, strict=False) if None not in pair]
    return bool(pairs) and all(one != another for one, another in pairs)
