"""Ranks of one machine cache in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradring
from gradring.testing import run_ranks
from support.tf_worker import take_one_thread

COUNT, EPOCHS = 24, 2


def cached(directory: str) -> Any:
    import tensorflow as tf

    files = tf.data.TFRecordDataset([f"{directory}/part-{i}.tfrecord" for i in range(3)])
    numbers = files.map(lambda text: tf.strings.to_number(text, tf.int64))
    return numbers.cache(f"{directory}/cache").batch(8)


def read(directory: str, policy: str, is_early: bool) -> list[list[int]]:
    """What this rank sees in each epoch."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    # TensorFlow writes the graph of a dataset that was made before the first strategy.
    take_one_thread()
    early = cached(directory) if is_early else None
    with gradring.init() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        dataset = cached(directory) if early is None else early
        if policy == "function":
            distributed = strategy.distribute_datasets_from_function(lambda _: dataset)
        else:
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = getattr(
                tf.data.experimental.AutoShardPolicy, policy
            )
            distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))
        return [
            [
                int(value)
                for batch in distributed
                for part in strategy.experimental_local_results(batch)
                for value in part.numpy()
            ]
            for _ in range(EPOCHS)
        ]


@pytest.mark.parametrize(
    ("policy", "is_early"),
    [("AUTO", False), ("AUTO", True), ("DATA", False), ("OFF", True), ("function", False)],
)
def test_each_element_comes_once_whoever_has_written_the_cache(
    tmp_path: Path, policy: str, is_early: bool
) -> None:
    import tensorflow as tf

    directory = str(tmp_path)
    for part in range(3):
        with tf.io.TFRecordWriter(f"{directory}/part-{part}.tfrecord") as writer:
            for number in range(part * 8, part * 8 + 8):
                writer.write(str(number).encode())
    # One process has written a cache of all elements before.
    assert len(list(cached(directory).unbatch())) == COUNT
    times = 2 if policy in ("OFF", "function") else 1
    for _ in range(2):  # the second job finds the caches of the first one
        first, second = run_ranks(read, 2, directory, policy, is_early)
        for epoch in range(EPOCHS):
            assert sorted(first[epoch] + second[epoch]) == sorted([*range(COUNT)] * times)
    indices = sorted(path.name for path in tmp_path.glob("cache*.index"))
    kind = {"function": "own"}.get(policy, policy.lower())
    ranks = [f"cache.{kind}-rank-{rank}-of-2.index" for rank in (0, 1)]
    assert indices == sorted(["cache.index", *ranks])


def test_a_dataset_without_such_a_cache_stays_what_it_is() -> None:
    import tensorflow as tf

    from gradring.config.parse import Place
    from gradring.tensorflow.data import file_caches, made

    made.remember()
    for dataset in (tf.data.Dataset.range(4), tf.data.Dataset.range(4).cache().map(lambda x: x)):
        assert file_caches.own(dataset, Place(0, 2)) is dataset
    in_a_file = tf.data.Dataset.range(4).cache("cache")
    assert file_caches.own(in_a_file, Place(0, 1)) is in_a_file
