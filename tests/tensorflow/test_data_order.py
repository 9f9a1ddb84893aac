"""Pipelines that shuffle: every element of an epoch goes to exactly one worker."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring.errors
from gradring.testing import run_ranks
from support.keras_models import CAN_FIT, needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

#: Divisible by nothing.
COUNT = 997
BATCH = 96
EPOCHS = 3
#: As in one process: in functions, as if they had seeds.
SAME_IN_EACH_EPOCH = (
    "one order",
    "cache",
    "sample_from_datasets",
    "in a function",
    "in a nested function",
    "in any order",
    "seeded in a function",
    "of each element",
)
#: Tried with global seeds that differ, too.
MAIN = ("shuffle", "a seed for each rank", "in a function", "tensor", "files")
#: In every run of the tests: those, and what caches, captures, has a policy, or any order.
QUICK = (
    *(*MAIN, "cache", "captures", "files, FILE"),
    *("in any order", "options", "seeded in a function", "of each element"),
)
#: So many that two epochs have the same order of files less often than once in a million runs.
FILES = 13


def pipelines(directory: str, rank: int) -> dict[str, Callable[[], Any]]:
    """Batches of 0 to COUNT - 1, once in an epoch."""
    import tensorflow as tf

    data = tf.data.Dataset
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.range(COUNT, dtype=tf.int64), tf.range(COUNT, dtype=tf.int64)
        ),
        -1,
    )
    offset = tf.Variable(0, dtype=tf.int64)
    paths = sorted(str(path) for path in Path(directory).iterdir())

    def numbers(paths: Any) -> Any:
        return data.range(0).concatenate(
            tf.data.TextLineDataset(paths).map(lambda line: tf.strings.to_number(line, tf.int64))
        )

    def generated() -> Any:
        yield from np.arange(COUNT)

    def permuted(_: Any) -> Any:
        return tf.random.shuffle(tf.range(COUNT, dtype=tf.int64))

    def blocks(start: Any) -> Any:
        last = tf.minimum(start + 100, COUNT)
        return data.range(start, last).shuffle(100)

    def seeded_blocks(start: Any) -> Any:
        return data.range(start, tf.minimum(start + 100, COUNT)).shuffle(100, seed=rank + 1)

    def permuted_block(start: Any) -> Any:
        return tf.random.shuffle(tf.range(start, tf.minimum(start + 100, COUNT)))

    starts = data.range(0, COUNT, 100)
    whole = data.range(COUNT)
    unordered, by_file = tf.data.Options(), tf.data.Options()
    unordered.deterministic = False
    by_file.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return {
        "shuffle": lambda: whole.shuffle(COUNT).batch(BATCH),
        "a seed for each rank": lambda: whole.shuffle(COUNT, seed=rank + 1).batch(BATCH),
        "small buffer, twice": lambda: whole.shuffle(50).shuffle(20).batch(BATCH).prefetch(2),
        "of batches": lambda: whole.batch(BATCH).shuffle(100),
        "cache": lambda: whole.shuffle(COUNT).cache().batch(BATCH),
        "after a cache": lambda: whole.cache().shuffle(COUNT).batch(BATCH),
        "one order": lambda: whole.shuffle(COUNT, reshuffle_each_iteration=False).batch(BATCH),
        "captures": lambda: (
            whole.shuffle(COUNT).map(lambda x: table.lookup(x) + offset).batch(BATCH)
        ),
        "generator": lambda: (
            data.from_generator(generated, output_signature=tf.TensorSpec([], tf.int64))
            .shuffle(COUNT)
            .batch(BATCH)
        ),
        "py_function": lambda: (
            whole.shuffle(COUNT)
            .map(lambda x: tf.numpy_function(lambda v: v, [x], tf.int64))
            .map(lambda x: tf.ensure_shape(x, []))
            .batch(BATCH)
        ),
        "zip": lambda: data.zip((whole, whole)).shuffle(COUNT).map(lambda a, _: a).batch(BATCH),
        "concatenate": lambda: (
            whole.take(500).shuffle(500).concatenate(whole.skip(500).shuffle(500)).batch(BATCH)
        ),
        "sample_from_datasets": lambda: data.sample_from_datasets(
            [whole.take(500), whole.skip(500)]
        ).batch(BATCH),
        "in a function": lambda: starts.interleave(blocks).batch(BATCH),
        "in a nested function": lambda: (
            data.range(1).flat_map(lambda _: starts.interleave(blocks)).batch(BATCH)
        ),
        "seeded in a function": lambda: starts.interleave(seeded_blocks).batch(BATCH),
        "of each element": lambda: starts.map(permuted_block).unbatch().batch(BATCH),
        "tensor": lambda: data.range(1).map(permuted).unbatch().batch(BATCH),
        "in any order": lambda: starts.interleave(
            blocks, cycle_length=4, num_parallel_calls=4, deterministic=False
        ).batch(BATCH),
        "options": lambda: (
            whole.shuffle(COUNT)
            .map(lambda x: x, num_parallel_calls=4)
            .batch(BATCH)
            .with_options(unordered)
        ),
        "files": lambda: (
            data.list_files(f"{directory}/*.txt").interleave(numbers).shuffle(100).batch(BATCH)
        ),
        "files, FILE": lambda: (
            data.from_tensor_slices(paths)
            .shuffle(FILES)
            .flat_map(tf.data.TextLineDataset)
            .map(lambda line: tf.strings.to_number(line, tf.int64))
            .batch(BATCH)
            .with_options(by_file)
        ),
    }


def worker(directory: str, seeded: bool, names: tuple[str, ...], early: bool = False) -> Any:
    """Each pipeline's elements on this rank, epoch by epoch; of those with a name, or of all.

    Those that are made early are there before the strategy.
    """
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        if seeded:
            keras.utils.set_random_seed(comm.rank)
        made = pipelines(directory, comm.rank)
        made_before = {name: made[name]() for name in names or made} if early else {}
        strategy = CustomCollectiveStrategy(communicator=comm)

        def epochs(dataset: Any) -> list[list[int]]:
            batches = strategy.experimental_distribute_dataset(dataset)
            return [
                [
                    x
                    for batch in batches
                    for x in strategy.experimental_local_results(batch)[0].numpy().tolist()
                ]
                for _ in range(EPOCHS)
            ]

        results = {
            name: epochs(made_before[name] if early else made[name]()) for name in names or made
        }
        repeated = tf.data.Dataset.range(COUNT)
        results["repeated"] = epochs(repeated.repeat(2).shuffle(COUNT).batch(BATCH))
        results["shuffled, repeated"] = epochs(repeated.shuffle(COUNT).repeat(2).batch(BATCH))
        off = tf.data.Options()
        off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        shuffled = repeated.shuffle(COUNT).batch(BATCH)
        results["own"] = epochs(shuffled.with_options(off))
        for name in ("array", "shuffled in fit", "seeded in fit") if CAN_FIT else ():
            results[name] = fitted(strategy, name)
        for name in ("array", "seeded in fit") if CAN_FIT else ():
            results[f"{name}, alone"] = fitted(tf.distribute.get_strategy(), name)
        before = comm.stats()["count"]
        strategy.experimental_distribute_dataset(repeated.batch(BATCH))
        assert comm.stats()["count"] == before + 2, "batch sizes and Python code, and no order"
        return results


def fitted(strategy: Any, name: str) -> list[list[int]]:
    """What `fit` gives to this rank's training step, epoch by epoch."""
    import keras
    import tensorflow as tf

    seen: list[list[int]] = []

    class Model(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, x: Any) -> Any:
            tf.py_function(lambda x: seen[-1].extend(x.numpy().ravel().tolist()), [x], [])
            return {"loss": tf.constant(0.0)}

    begin = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append([]))
    with strategy.scope():
        model = Model()
        model.compile("sgd")
    numbers = np.arange(COUNT).reshape(-1, 1)
    if name == "array":
        model.fit(numbers, batch_size=BATCH, epochs=EPOCHS, callbacks=[begin], verbose=0)
    else:
        seed = 7 if name == "seeded in fit" else None
        data = tf.data.Dataset.from_tensor_slices(numbers).shuffle(COUNT, seed).batch(BATCH)
        model.fit(data, epochs=EPOCHS, callbacks=[begin], verbose=0)
    return seen


def other_data() -> Any:
    """What a rank says whose data in memory, or whose pipeline, is another than the chief's."""
    import tensorflow as tf

    with join() as comm:
        # Made before the strategy, and captured, so that nothing is known of it.
        inner = tf.data.Dataset.range(COUNT).shuffle(COUNT)
        early = tf.data.Dataset.range(1).flat_map(lambda _: inner).batch(BATCH)

        from gradring.tensorflow import CustomCollectiveStrategy

        strategy = CustomCollectiveStrategy(communicator=comm)
        with pytest.raises(gradring.errors.ConfigError) as refused:
            strategy.experimental_distribute_dataset(early)
        said = kept_lines()
        own = np.random.default_rng(comm.rank).permutation(COUNT)
        data = tf.data.Dataset.from_tensor_slices(own).batch(BATCH)
        strategy.experimental_distribute_dataset(data)
        data = tf.data.Dataset.range(COUNT).shuffle(COUNT).batch(BATCH)
        if comm.rank == 1:
            data = data.shuffle(3)
        with pytest.raises(gradring.errors.MismatchError) as mismatched:
            strategy.experimental_distribute_dataset(data)
        return str(refused.value), said, str(mismatched.value)


@pytest.mark.usefixtures("fresh_interpreters")
def test_what_cannot_be_made_right_is_named() -> None:
    for rank, (refused, records, mismatched) in enumerate(run_ranks(other_data, 2)):
        assert "_BatchDataset" in refused and "make the strategy first" in refused
        warnings = [line for line in records if "differ from the chief's" in line]
        assert len(warnings) == rank
        assert all("_BatchDataset" in line and "on rank 1 of" in line for line in warnings)
        assert "1 shuffles" in mismatched and "2 shuffles" in mismatched


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False, QUICK), id="2 ranks, some"),
        pytest.param((2, False, (*QUICK, "in a nested function"), True), id="made early"),
        pytest.param((2, False, ()), id="2 ranks", marks=pytest.mark.slow),
        pytest.param((3, True, MAIN), id="3, global seeds", marks=pytest.mark.slow),
    ],
)
def epochs(request: Any, tmp_path_factory: Any) -> Any:
    world_size, *settings = request.param
    directory = tmp_path_factory.mktemp("numbers")
    for file in range(FILES):
        lines = range(file * COUNT // FILES, (file + 1) * COUNT // FILES)
        (directory / f"{file}.txt").write_text("".join(f"{line}\n" for line in lines))
    return run_ranks(worker, world_size, str(directory), *settings, timeout=240)


def test_every_element_of_an_epoch_goes_to_one_worker(epochs: Any) -> None:
    for name in epochs[0]:
        if name == "own" or name.endswith("alone"):
            continue
        times = 2 if "repeated" in name else 1
        for epoch in range(EPOCHS):
            counted = Counter(x for rank in epochs for x in rank[name][epoch])
            wrong = {x: n for x, n in counted.items() if n != times}
            assert len(counted) == COUNT and not wrong, (name, epoch, len(counted), len(wrong))


def test_every_epoch_has_another_order_and_every_rank_the_same_number_of_elements(
    epochs: Any,
) -> None:
    # Keras 3.16.0.dev of October 2026 shuffles arrays alike in each epoch, in one process too.
    first, second, *_ = epochs[0].get("array, alone", [0, 1])
    alike = ("array", "array, alone") if first == second else ()
    for name, orders in epochs[0].items():
        if name in (*SAME_IN_EACH_EPOCH, *alike):
            assert orders[0] == orders[1] == orders[2], name
        else:
            assert orders[0] != orders[1] and orders[1] != orders[2], name


@needs_fit
def test_fit_has_the_order_of_one_process_where_shuffles_have_seeds(epochs: Any) -> None:
    alone = epochs[0]["seeded in fit, alone"]
    part = BATCH // len(epochs)
    for epoch in range(EPOCHS):
        for batch in range(COUNT // BATCH):
            own = [rank["seeded in fit"][epoch][part * batch :][:part] for rank in epochs]
            whole = alone[epoch][BATCH * batch :][:BATCH]
            assert sorted(chain(*own)) == sorted(whole), (epoch, batch)


def test_workers_that_share_nothing_out_keep_their_own_orders(epochs: Any) -> None:
    first, second, *_ = (rank["own"] for rank in epochs)
    assert sorted(first[0]) == sorted(second[0]) == list(range(COUNT))
    assert first[0] != second[0]
