"""Shares of two workers in a dataset of global batches."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.keras_models import CAN_FIT, needs_fit
from support.tf_worker import join

FILES = 4
#: In every file: tens are the file's number.
RECORDS_PER_FILE = 3
BATCH = 4

RANGE = list(range(10))

#: Policy and kind of dataset, and each worker's batches.
SHARDS: dict[tuple[str, str], Any] = {
    ("AUTO", "range"): ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]),
    ("DATA", "range"): ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]),
    ("OFF", "range"): ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],) * 2,
    # Whole files, dealt out in turn.
    ("AUTO", "files"): ([[0, 1], [2, 20], [21, 22]], [[10, 11], [12, 30], [31, 32]]),
    ("FILE", "files"): ([[0, 1], [2, 20], [21, 22]], [[10, 11], [12, 30], [31, 32]]),
    ("DATA", "files"): ([[0, 1], [11, 12], [22, 30]], [[2, 10], [20, 21], [31, 32]]),
    ("OFF", "files"): ([[0, 1], [2, 10], [11, 12], [20, 21], [22, 30], [31, 32]],) * 2,
}

#: The last batch of an epoch: one worker has more elements than the other, which may have none.
LAST_BATCHES = ((1, 2, 6), (6,))

#: The samples of each rank, and how many are in each of its batches.
UNEVEN = ([1.0, 2.0, 0.5, 4.0, 3.0], [0.25, 5.0, 1.5, 2.5, 3.5, 0.75, 1.25, 2.25])
SPLITS = ([2, 2, 1], [3, 5])

#: So many iterators are left before their end.
LEFT = 32


def mean_in_fit(strategy: Any, batch: tuple[int, ...]) -> float:
    """What one step of `fit` takes for the mean of a batch: the gradient of the loss mean(t w)."""
    import keras
    import tensorflow as tf

    class Linear(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_mean(y_true * y_pred, axis=-1)

    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((1,)), dense])
        model.compile(keras.optimizers.SGD(1.0), Linear(), metrics=["mse"])
    targets = tf.constant(batch, tf.float32)[:, tf.newaxis]
    data = tf.data.Dataset.from_tensor_slices((tf.ones_like(targets), targets)).batch(BATCH)
    history = model.fit(data, verbose=0).history
    assert history["mse"] == [pytest.approx(sum(t * t for t in batch) / len(batch))]
    return -float(model.get_weights()[0][0, 0])


def mean_in_a_loop(strategy: Any, batch: tuple[int, ...]) -> float:
    """The same of a loop that divides the loss by the number of elements of all workers."""
    import tensorflow as tf

    with strategy.scope():
        weight = tf.Variable(0.0)

    def replica_step(part: Any) -> Any:
        context = tf.distribute.get_replica_context()
        count = context.all_reduce("SUM", tf.cast(tf.shape(part)[0], tf.float32))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(part * weight) / count
        return context.all_reduce("SUM", tape.gradient(loss, weight))

    @tf.function  # type: ignore[untyped-decorator]
    def step(part: Any) -> Any:
        return strategy.run(replica_step, (part,))

    data = tf.data.Dataset.from_tensor_slices(tf.constant(batch, tf.float32)).batch(BATCH)
    (part,) = strategy.experimental_distribute_dataset(data)
    return float(step(part))


def uneven_loops(comm: Any) -> dict[str, Any]:
    """Loops over data of each rank's own: rank 0 has 5 samples in 3 batches, rank 1 has 8 in 2."""
    import tensorflow as tf

    from gradring.errors import ConfigError
    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer, join

    def batches(rank: int) -> list[Any]:
        features = tf.constant(UNEVEN[rank])
        return [(part, 3 * part) for part in tf.split(features, SPLITS[rank])]

    def loss_of(weight: Any, features: Any, targets: Any) -> Any:
        return tf.reduce_mean((features * weight - targets) ** 2)

    def gradient_of(weight: Any, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(weight, *batch)
        return tape.gradient(loss, weight)

    def alone() -> list[float]:
        """One process that has the samples of both in each step."""
        weight, values = tf.Variable(0.0), []
        parts = [batches(rank) for rank in (0, 1)]
        for step in range(max(map(len, parts))):
            present = [part[step] for part in parts if step < len(part)]
            batch = [tf.concat(column, 0) for column in zip(*present, strict=True)]
            weight.assign_sub(0.01 * gradient_of(weight, batch))
            values.append(float(weight))
        return values

    def by_reducer(source: Any, is_graph: bool) -> list[float]:
        reducer, weight, values = GradientReducer(communicator=comm), tf.Variable(0.0), []

        def step(features: Any, targets: Any) -> None:
            gradient = gradient_of(weight, (features, targets))
            rows = tf.IndexedSlices(gradient[tf.newaxis], tf.constant([comm.rank]), [2])
            dense, sparse = reducer([gradient, rows], samples=tf.shape(features)[0])
            tf.debugging.assert_near(dense, tf.reduce_sum(tf.convert_to_tensor(sparse)))
            weight.assign_sub(0.01 * dense)

        if is_graph:
            spec = tf.TensorSpec([None], tf.float32)
            step = tf.function(step, input_signature=[spec, spec])
        for batch in join(source, comm):
            step(*batch)
            values.append(float(weight))
        return values

    def by_strategy(source: Any) -> list[float]:
        strategy, values = CustomCollectiveStrategy(communicator=comm), []
        with strategy.scope():
            weight = tf.Variable(0.0)

        def replica_step(features: Any, targets: Any) -> None:
            context = tf.distribute.get_replica_context()
            samples = context.all_reduce("SUM", tf.cast(tf.shape(features)[0], tf.float32))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((features * weight - targets) ** 2) / samples
            weight.assign_sub(0.01 * context.all_reduce("SUM", tape.gradient(loss, weight)))

        for batch in join(source, comm):
            strategy.run(replica_step, batch)
            values.append(float(weight.read_value()))
        return values

    def dataset() -> Any:
        """Of numbers, which rank 1 has none of."""
        numbers = tf.data.Dataset.range(5 if comm.rank == 0 else 0)
        return [x.numpy().tolist() for x in join(numbers.batch(2), comm)]

    def refused(source: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            list(join(source, comm))
        return f"{raised.value.rank}: {raised.value}"

    own = batches(comm.rank)
    ragged = [tf.ragged.constant([[1], [2, 3]])] * (1 + comm.rank)
    sparse = [tf.sparse.from_dense([[1, 0], [0, 2], [3, 0]])] * (1 + comm.rank)
    return {
        "alone": alone(),
        "eager": by_reducer(own, is_graph=False),
        "graph": by_reducer(iter([tuple(map(np.asarray, batch)) for batch in own]), is_graph=True),
        "strategy": by_strategy(own),
        "dataset": dataset(),
        "others": [
            [int(part.shape[0]) for part in join(source, comm)] for source in (ragged, sparse)
        ],
        "refused": refused(own if comm.rank == 0 else []),
        "usable": float(comm.all_reduce(np.ones(1))[0]),
    }


def leave_early(devices: int) -> int:
    """How many iterators were left while their threads were computing further elements.

    What TensorFlow does wrongly then ends two processes in five by SIGSEGV, or all but one in
    ten million for so many rounds.
    """
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    def slow(number: Any) -> Any:
        ones = tf.ones((700, 700)) * tf.cast(number, tf.float32)
        return (ones @ ones)[0, 0]

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(devices)]
    tf.config.set_logical_device_configuration(cpu, logical)
    options = tf.data.Options()
    # As Keras does; the optimised copy of a dataset would have an owner.
    options.experimental_optimization.apply_default_optimizations = False
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        dataset = tf.data.Dataset.range(100).map(slow).batch(2).with_options(options)
        dataset = strategy.experimental_distribute_dataset(dataset)
        gc.collect()
        gc.freeze()  # the collections below shall take less time than an element
        for _ in range(LEFT):
            iterator = iter(dataset)
            gc.collect()
            next(iterator)
            del iterator
            gc.collect()
        gc.unfreeze()
    return LEFT


def leave_while_it_reads(strategy: Any) -> bool:
    """Whether an iterator can be left while its thread waits for an element."""
    import tensorflow as tf

    waits, goes_on, has_gone_on = (threading.Event() for _ in range(3))

    def elements() -> Iterator[int]:
        yield from range(2)
        waits.set()
        goes_on.wait(30)
        has_gone_on.set()
        yield from range(2)

    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec((), tf.int64))
    dataset = strategy.experimental_distribute_dataset(dataset.batch(2, drop_remainder=True))
    iterator = iter(dataset)
    next(iterator)
    waits.wait()
    del iterator
    could_leave = not has_gone_on.is_set()
    goes_on.set()
    has_gone_on.wait()
    return could_leave


def worker(directory: str) -> Any:
    import tensorflow as tf
    from tensorflow.python.data.ops import multi_device_iterator_ops

    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)

        def files() -> Any:
            paths = sorted(str(path) for path in Path(directory).iterdir())
            return tf.data.TFRecordDataset(paths).map(lambda r: tf.strings.to_number(r, tf.int64))

        def batches(policy: str, kind: str) -> Any:
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = getattr(
                tf.data.experimental.AutoShardPolicy, policy
            )
            dataset = files() if kind == "files" else tf.data.Dataset.range(len(RANGE))
            dataset = dataset.batch(BATCH).with_options(options)
            return local(strategy.experimental_distribute_dataset(dataset))

        def local(batches: Any) -> Any:
            return [strategy.experimental_local_results(b)[0].numpy().tolist() for b in batches]

        @tf.function  # type: ignore[untyped-decorator]
        def total(batches: Any) -> Any:
            """The sum over all workers, and the number of steps."""
            result, steps = tf.constant(0, tf.int64), 0
            for batch in batches:
                result += strategy.reduce("SUM", strategy.run(tf.reduce_sum, (batch,)), axis=None)
                steps += 1
            return result, steps

        def unequal(context: Any) -> Any:
            """One batch for worker 0, and two for worker 1."""
            size = context.get_per_replica_batch_size(BATCH)
            return tf.data.Dataset.range(size * (1 + context.input_pipeline_id)).batch(size)

        def distributed(count: int) -> Any:
            return strategy.experimental_distribute_dataset(
                tf.data.Dataset.range(count).batch(BATCH)
            )

        with pytest.MonkeyPatch.context() as patch:
            # What hands elements out to several devices.
            patch.setattr(multi_device_iterator_ops, "_PerDeviceGenerator", None)
            plain = local(distributed(BATCH))
        from_function = strategy.distribute_datasets_from_function
        with pytest.raises(tf.errors.NotFoundError) as refused:
            batches("FILE", "range")
        return {
            "shards": {case: batches(*case) for case in SHARDS},
            "totals": [
                tuple(int(part) for part in total(distributed(count))) for count in range(1, 11)
            ],
            "unequal": local(from_function(unequal)),
            "unequal total": tuple(int(part) for part in total(from_function(unequal))),
            "refused": str(refused.value),
            "fit": [mean_in_fit(strategy, batch) for batch in LAST_BATCHES] if CAN_FIT else None,
            "loop": [mean_in_a_loop(strategy, batch) for batch in LAST_BATCHES],
            "uneven loops": uneven_loops(comm),
            "read plainly": plain,
            "left while it reads": leave_while_it_reads(strategy),
        }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import tensorflow as tf

    directory = tmp_path_factory.mktemp("records")
    for file in range(FILES):
        with tf.io.TFRecordWriter(os.path.join(directory, f"{file}.tfrecord")) as writer:
            for record in range(RECORDS_PER_FILE):
                writer.write(str(10 * file + record).encode())
    return run_ranks(worker, 2, str(directory))


@pytest.mark.parametrize("case", SHARDS, ids="-".join)
def test_a_global_batch_is_divided_as_the_policy_says(ranks: Any, case: tuple[str, str]) -> None:
    found = tuple(result["shards"][case] for result in ranks)
    assert found == SHARDS[case]


def test_data_without_files_cannot_be_divided_by_files(ranks: Any) -> None:
    for result in ranks:
        assert "unshardable source dataset" in result["refused"]


def test_no_element_of_a_last_partial_batch_is_lost_or_counted_twice(ranks: Any) -> None:
    for result in ranks:
        assert result["totals"] == [
            (count * (count - 1) // 2, -(-count // BATCH)) for count in range(1, 11)
        ]


def test_the_shorter_worker_gets_empty_batches_until_all_have_ended(ranks: Any) -> None:
    assert [result["unequal"] for result in ranks] == [[[0, 1], []], [[0, 1], [2, 3]]]
    assert [result["unequal total"] for result in ranks] == [(7, 2), (7, 2)]


@pytest.mark.parametrize("way", [pytest.param("fit", marks=needs_fit), "loop"])
def test_every_element_of_a_last_partial_batch_counts_alike(ranks: Any, way: str) -> None:
    """In `fit`, and in a loop that divides by the number of elements of all workers."""
    for result in ranks:
        assert result[way] == pytest.approx([sum(batch) / len(batch) for batch in LAST_BATCHES])


@pytest.mark.parametrize("way", ["eager", "graph", "strategy"])
def test_loops_of_different_length_train_as_one_process_on_all_samples(
    ranks: Any, way: str
) -> None:
    loops = [result["uneven loops"] for result in ranks]
    assert loops[0][way] == loops[1][way] == pytest.approx(loops[0]["alone"], rel=1e-6)
    assert len(loops[0][way]) == max(map(len, SPLITS))


def test_a_rank_that_has_ended_gets_empty_batches_of_the_same_kind(ranks: Any) -> None:
    loops = [result["uneven loops"] for result in ranks]
    assert [loop["dataset"] for loop in loops] == [[[0, 1], [2, 3], [4]], [[], [], []]]
    assert [loop["others"] for loop in loops] == [[[2, 0], [3, 0]], [[2, 2], [3, 3]]]


def test_a_rank_without_any_batch_is_named_to_all(ranks: Any) -> None:
    for result in ranks:
        assert result["uneven loops"]["refused"].startswith("1: join: rank 1 on ")
        assert result["uneven loops"]["usable"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_an_iterator_can_be_left_while_it_reads_ahead(devices: int) -> None:
    assert run_ranks(leave_early, 2, devices) == [LEFT, LEFT]


def test_a_rank_of_one_device_reads_without_handing_out(ranks: Any) -> None:
    assert [result["read plainly"] for result in ranks] == [[[0, 1]], [[2, 3]]]


def test_an_iterator_can_be_left_while_its_dataset_waits_for_an_element(ranks: Any) -> None:
    assert [result["left while it reads"] for result in ranks] == [True, True]
