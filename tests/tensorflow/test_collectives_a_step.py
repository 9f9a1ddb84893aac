"""A step of a real model is a few collectives, and its moving statistics are those of all ranks.

The processes have TensorFlow's defaults, as a user's have.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradring
from gradring import updates
from gradring.launch.ranks import THREAD_VARIABLES
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import CAN_FIT, needs_fit

RANKS, STEPS, BATCH = 2, 6, 8
SIDE = 8

#: Statistics are sums of float32 in another order than the oracle's.
TOLERANCE = 1e-5

Batch = tuple[np.ndarray, np.ndarray]
#: For each step, what each rank has.
Parts = list[list[Batch]]


def parts(rows: Callable[[int, int], int] = lambda step, rank: BATCH, ranks: int = RANKS) -> Parts:
    draw = np.random.default_rng(0)
    return [[_batch(draw, rows(step, rank)) for rank in range(ranks)] for step in range(STEPS)]


def _batch(draw: Any, rows: int) -> Batch:
    images = draw.normal(1.0, 3.0, (rows, SIDE, SIDE, 3)).astype(np.float32)
    return images, draw.integers(0, 5, rows)


def convolutions(calls: int = 1, **options: Any) -> Any:
    """Two convolutions with batch normalisation, the first of which is called `calls` times.

    No bias, as in MobileNet.
    """
    import keras

    keras.utils.set_random_seed(4)
    inputs = keras.layers.Input((SIDE, SIDE, 3))
    convolve = keras.layers.Conv2D(6, 3, use_bias=False, activation="tanh")
    normalise = keras.layers.BatchNormalization(momentum=0.8, **options)
    features = [normalise(convolve(inputs * (call + 1.0))) for call in range(calls)]
    x = keras.layers.add(features) if calls > 1 else features[0]
    x = keras.layers.Conv2D(12, 3, use_bias=False)(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(**options)(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(5, activation="softmax")(x))


twice = functools.partial(convolutions, calls=2)
synchronised = functools.partial(convolutions, synchronized=True)


def renormalised() -> Any:
    import keras

    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.layers.Input((SIDE, SIDE, 3)),
            keras.layers.BatchNormalization(renorm=True),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(5, activation="softmax"),
        ]
    )


def sequences() -> Any:
    """A graph does not know the shape of these kernels' gradients, if batches are of any size."""
    import keras

    dense = [keras.layers.Dense(16, activation="tanh") for _ in range(2)]
    layers = [keras.layers.Input((SIDE, SIDE, 3)), keras.layers.Reshape((-1, 3)), *dense]
    pooled = [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(5, activation="softmax")]
    return keras.Sequential([*layers, *pooled])


def followers(model: Any) -> list[Any]:
    """The variables that follow the batches."""
    return [v for v in model.variables if v.name.startswith(("moving", "renorm"))]


def statistics_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in followers(model)]


def expected(
    steps: Parts, build: Callable[[], Any] = convolutions, calls: int = 1
) -> list[np.ndarray]:
    """The rule: in each step, the mean over the ranks with samples of what each batch makes of what
    was before, by `calls` calls of the model. The weights stay what they are.
    """
    model = build()
    before = statistics_of(model)
    for ranks in steps:
        own = []
        for images, _ in ranks:
            if len(images):
                for variable, value in zip(followers(model), before, strict=True):
                    variable.assign(value)
                for _ in range(calls):
                    model(images, training=True)
                own.append(statistics_of(model))
        if own:
            before = [np.mean(values, axis=0) for values in zip(*own, strict=True)]
    return before


class Case:
    """A model under a strategy, an optimizer that leaves its weights alone, and a step."""

    def __init__(
        self,
        comm: gradring.Communicator,
        build: Callable[[], Any] = convolutions,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        import keras

        from gradring.tensorflow import CustomCollectiveStrategy

        self.comm = comm
        self.strategy = CustomCollectiveStrategy(communicator=comm, **options)
        with self.strategy.scope():
            self.model = build()
            self.optimizer = (optimizer or keras.optimizers.SGD)(0.0)
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(reduction="sum")

    def forward(self, images: Any) -> Any:
        return self.model(images, training=True)

    def step(self, images: Any, labels: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss_of(labels, self.forward(images)) / BATCH
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def train(self, steps: Parts, function: Callable[..., Any] | None = None) -> Any:
        """What is assigned in the end, and the collectives of a later step."""
        import tensorflow as tf

        signature = [tf.TensorSpec([None, SIDE, SIDE, 3]), tf.TensorSpec([None], tf.int64)]
        call = function or tf.function(
            lambda *batch: self.strategy.run(self.step, batch), input_signature=signature
        )
        counts = [self.comm.stats()["count"]]
        for ranks in steps:
            call(*map(tf.convert_to_tensor, ranks[self.comm.rank]))
            counts.append(self.comm.stats()["count"])
        return statistics_of(self.model), counts[-1] - counts[-2]


def whole_batches() -> Parts:
    together = [zip(*ranks, strict=True) for ranks in parts()]
    return [[(np.concatenate(images), np.concatenate(labels))] for images, labels in together]


def eagerly(comm: Any) -> Any:
    case = Case(comm)
    return case.train(parts(), lambda *batch: case.strategy.run(case.step, batch))


def a_function_in_the_step(comm: Any, traced_before: bool = False) -> Any:
    """Traced with the first of two steps that call it, or before and not again for them."""
    import tensorflow as tf

    case = Case(comm)
    case.forward = tf.function(case.forward)  # type: ignore[method-assign]
    if traced_before:
        images, _ = parts()[0][comm.rank]
        before = statistics_of(case.model)
        case.strategy.run(case.forward, (tf.convert_to_tensor(images),))
        for variable, value in zip(followers(case.model), before, strict=True):
            variable.assign(value)
    return case.train(parts())


def a_function_that_runs_eagerly(comm: Any) -> Any:
    import tensorflow as tf

    case = Case(comm)
    forward = tf.function(case.forward)
    return case.train(parts(), lambda images, _: case.strategy.run(forward, (images,)))


def accumulating(rate: float) -> Any:
    import keras

    return keras.optimizers.SGD(rate, gradient_accumulation_steps=2)


def scaling(rate: float) -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate))


def a_loop_in_the_step(comm: Any) -> Any:
    """Two micro batches: both calls are in the body of a `tf.while_loop`."""
    import tensorflow as tf

    case = Case(comm)

    @tf.function  # type: ignore[untyped-decorator]
    def step(images: Any, labels: Any) -> None:
        for _ in tf.range(2):
            case.forward(images)
        case.step(images, labels)

    return case.train(parts(), tf.function(lambda *batch: case.strategy.run(step, batch)))


def a_loop_around_the_steps(comm: Any) -> Any:
    import tensorflow as tf

    case = Case(comm)

    @tf.function  # type: ignore[untyped-decorator]
    def steps(images: Any, labels: Any) -> None:
        for _ in tf.range(3):
            case.strategy.run(case.step, (images, labels))

    return case.train(parts(), steps)


def without_rank_1() -> Parts:
    return [[(images, labels), (images[:0], labels[:0])] for (images, labels), _ in parts()]


def a_conditional(comm: Any) -> Any:
    """Only rank 0 calls the layers to train; both take part in the collective."""
    import tensorflow as tf

    case = Case(comm)
    case.forward = lambda images: tf.cond(  # type: ignore[method-assign]
        tf.shape(images)[0] > comm.rank * BATCH,
        lambda: case.model(images, training=True),
        lambda: case.model(images, training=False),
    )
    return case.train(parts())


def ending_data() -> Parts:
    """Rank 1 has fewer steps, and the last one is empty on both."""
    return parts(lambda step, rank: BATCH * int(step < (STEPS - 1, 3)[rank]))


def frozen(comm: Any) -> Any:
    """The second layer does not follow the batches."""
    case = Case(comm)
    case.model.layers[-4].trainable = False
    return case.train(parts())


def read_in_the_step(comm: Any) -> Any:
    """What follows the training reads the mean already."""
    import tensorflow as tf

    case = Case(comm)
    seen = []
    images, _ = parts()[0][0]

    @tf.function  # type: ignore[untyped-decorator]
    def steps(*batch: Any) -> Any:
        def step(*batch: Any) -> Any:
            case.forward(batch[0])
            return case.model(images, training=False)

        return case.strategy.run(step, batch)

    found = case.train(parts(), lambda *batch: seen.append(steps(*batch)))
    after = case.model(images, training=False)
    return *found, np.asarray(seen[-1]), np.asarray(after)


def in_fit(comm: Any, options: dict[str, Any]) -> Any:
    import tensorflow as tf

    batches = [batch for ranks in parts() for batch in ranks]
    rows = tuple(np.concatenate(values) for values in zip(*batches, strict=True))
    data = tf.data.Dataset.from_tensor_slices(rows).batch(RANKS * BATCH)
    case = Case(comm)
    case.model.compile(
        case.optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options
    )
    case.model.fit(data, verbose=0)
    return statistics_of(case.model), 0


@functools.cache
def of_all_batches() -> list[np.ndarray]:
    return expected(parts())


def case_of(*what: Any, steps: Callable[[], Parts] = parts, **options: Any) -> Any:
    """A function that trains a `Case` of this in a loop."""
    return lambda comm: Case(comm, *what, **options).train(steps())


#: By case: what trains, collectives of a step, and the statistics that it should lead to.
CASES: dict[str, tuple[Callable[[Any], Any], int, Callable[[], Any]]] = {
    "in_a_loop": (case_of(), 1, of_all_batches),
    "eagerly": (eagerly, 1, of_all_batches),
    "a_layer_called_twice": (case_of(twice), 1, lambda: expected(parts(), twice)),
    # Of each layer, its moments and their gradient.
    "synchronised_layers": (case_of(synchronised), 5, lambda: expected(whole_batches())),
    "renormalisation": (case_of(renormalised), 1, lambda: expected(parts(), renormalised)),
    "a_function_in_the_step": (a_function_in_the_step, 1, of_all_batches),
    "a_function_traced_before": (
        functools.partial(a_function_in_the_step, traced_before=True),
        1,
        of_all_batches,
    ),
    "a_function_that_runs_eagerly": (a_function_that_runs_eagerly, 1, of_all_batches),
    "a_loop_in_the_step": (a_loop_in_the_step, 1, lambda: expected(parts(), calls=3)),
    "a_loop_around_the_steps": (a_loop_around_the_steps, 3, lambda: expected(parts(), calls=3)),
    "a_conditional": (a_conditional, 1, lambda: expected(without_rank_1())),
    "ending_data": (case_of(steps=ending_data), 1, lambda: expected(ending_data())),
    # Beside the gradients, of which every second step reduces some.
    "accumulated": (case_of(optimizer=accumulating), 2, of_all_batches),
    # Whether all gradients are finite, in front of the gradients.
    "a_loss_scale": (case_of(optimizer=scaling), 3, of_all_batches),
    "checked_gradients": (case_of(check_gradients="raise"), 2, of_all_batches),
    "dense_layers_of_sequences": (case_of(sequences), 1, list),
    "local_steps": (case_of(update=updates.LocalSGD(every=2)), 1, of_all_batches),
}
#: By case: options of `compile`.
IN_FIT: dict[str, dict[str, Any]] = {
    "in_fit": {},
    "in_fit_of_several_steps": {"steps_per_execution": 4},
    "in_fit_that_runs_eagerly": {"run_eagerly": True},
}
#: In every run of the tests: graphs, functions and loops in them, ranks without data, and `fit`.
QUICK = (
    "in_a_loop",
    "synchronised_layers",
    "a_function_traced_before",
    "a_loop_around_the_steps",
    "ending_data",
    "dense_layers_of_sequences",
)
QUICK_IN_FIT = ("in_fit",)


def take_default_threads() -> None:
    """`run_ranks` divides the cores, which TensorFlow by itself does not."""
    for variable in THREAD_VARIABLES:
        os.environ.pop(variable, None)


def all_cases(names: list[str]) -> Any:
    """What the cases of these names find, and what they should, which that of a loop always is."""
    take_default_threads()
    chosen = {case: train for case, (train, *_) in CASES.items() if case in names}
    with gradring.init() as comm:
        found = {case: train(comm) for case, train in chosen.items()}
        for case in IN_FIT if CAN_FIT else ():
            if case in names:
                found[case] = in_fit(comm, IN_FIT[case])
        found |= {"frozen": frozen(comm), "read_in_the_step": read_in_the_step(comm)}
    return found, {case: CASES[case][-1]() for case in {"in_a_loop", *chosen}}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    return run_ranks(all_cases, RANKS, chosen(request, "case"), timeout=600)


def assert_close(found: list[np.ndarray], right: list[np.ndarray]) -> None:
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_allclose(mine, other, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_statistics_are_the_mean_over_the_ranks_that_had_samples(found: Any, case: str) -> None:
    (first, right), (second, _) = found
    assert_close(first[case][0], right[case])
    for mine, other in zip(first[case][0], second[case][0], strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_statistics_travel_with_the_gradients(found: Any, case: str) -> None:
    _, count, _ = CASES[case]
    assert [rank[case][1] for rank, _ in found] == [count] * RANKS


def test_a_frozen_layer_keeps_its_statistics(found: Any) -> None:
    for rank, right in found:
        (*followed, mean, variance), _ = rank["frozen"]
        assert_close(followed, right["in_a_loop"][:2])
        assert (mean == 0.0).all() and (variance == 1.0).all()


def test_a_layer_that_normalises_by_its_statistics_has_those_of_all_ranks(found: Any) -> None:
    for rank, right in found:
        statistics, _, seen, after = rank["read_in_the_step"]
        assert_close(statistics, right["in_a_loop"])
        np.testing.assert_allclose(seen, after, TOLERANCE, TOLERANCE)


def calls_of_layers() -> list[tuple[str, Any, Any]]:
    """What a moving mean is after a step with calls of several kinds, and what it should be.

    The ranks' batches have the means 1 and 11, and the momentum is a half.
    """
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with gradring.init() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        rank = comm.rank
        x = tf.fill((2, 3), 1.0 + 10.0 * rank)

        def train(layer: Any, rows: Any = x) -> Any:
            return tf.reduce_sum(layer(rows, training=True))

        def unless_of(empty: Any) -> Any:
            return tf.ensure_shape(x[: tf.where(empty, 0, 2)], (None, 3))

        def branch(layer: Any, is_taken: Any) -> None:
            tf.cond(is_taken, lambda: train(layer), lambda: 0.0)

        def direct_and_branch(layer: Any, step: Any) -> None:
            train(layer)
            branch(layer, step > 9)

        def branch_and_direct(layer: Any, step: Any) -> None:
            branch(layer, step > 9)
            train(layer)

        def branch_of_one_rank(layer: Any, step: Any) -> None:
            train(layer)
            branch(layer, tf.equal(step, rank))

        def empty_and_function(layer: Any, step: Any) -> None:
            train(layer, unless_of(tf.equal(step + 1, rank)))
            tf.function(lambda: train(layer))()

        def all_empty(layer: Any, step: Any) -> None:
            train(layer, unless_of(step < 9))

        def empty_and_read(layer: Any, step: Any) -> None:
            train(layer, unless_of(tf.equal(step + 1, rank)))
            tf.function(lambda: layer(x, training=False))()

        inner = tf.function(train)

        def function_of_some_steps(layer: Any, step: Any) -> None:
            train(layer)
            tf.cond(step > 9, lambda: inner(layer), lambda: 0.0)

        kinds = (
            (direct_and_branch, 3.0),
            (branch_and_direct, 3.0),
            (branch_of_one_rank, 3.125),
            (empty_and_function, 3.125),
            (all_empty, 0.0),
            (empty_and_read, 0.5),
            (function_of_some_steps, 3.0),
        )
        found = []
        for call, right in kinds:
            with strategy.scope():
                layer = keras.layers.BatchNormalization(momentum=0.5)
                layer.build((None, 3))
            for _ in range(2):  # the second function may find inner ones that are traced already
                layer.moving_mean.assign(tf.zeros(3))
                tf.function(lambda of=layer, do=call: strategy.run(do, (of, tf.constant(0))))()
                found.append((call.__name__, layer.moving_mean.numpy().tolist(), [right] * 3))

        def other_lengths(layers: Any, step: Any) -> None:
            for _ in range(1 + 2 * rank):
                train(layers[0])
            train(layers[1], x + 100.0)

        with strategy.scope():
            layers = [keras.layers.BatchNormalization(momentum=0.5) for _ in range(2)]
            for layer in layers:
                layer.build((None, 3))
        tf.function(lambda: strategy.run(other_lengths, (layers, 0)))()
        for layer, right in zip(layers, (5.0625, 53.0), strict=True):
            found.append(("other_lengths", layer.moving_mean.numpy().tolist(), [right] * 3))
        return found


def test_calls_of_all_kinds_count() -> None:
    for results in run_ranks(calls_of_layers, RANKS, timeout=300):
        for name, mean, right in results:
            assert mean == right, name


def ops_of_a_layer(strategy: Any) -> float:
    """The ops that each layer of batch normalisation adds to the graph of a training step."""
    import keras
    import tensorflow as tf

    def count(layers: int) -> int:
        with strategy.scope():
            normalised = [keras.layers.BatchNormalization() for _ in range(layers)]
            model = keras.Sequential([keras.layers.Input((3,)), *normalised])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        function = tf.function(lambda x: strategy.run(step, (x,)))
        graph = function.get_concrete_function(tf.TensorSpec((None, 3))).graph
        return len(graph.get_operations())

    return (count(6) - count(2)) / 4


def count_ops_of_a_layer() -> tuple[float, float]:
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with gradring.init() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        return ops_of_a_layer(tf.distribute.get_strategy()), ops_of_a_layer(strategy)


def test_a_layer_of_batch_normalisation_costs_few_ops() -> None:
    """Hundreds of layers are a quarter of the time that a strategy adds to a step."""
    for plain, ours in run_ranks(count_ops_of_a_layer, RANKS):
        assert plain > 20.0
        assert ours < plain + 25.0


@needs_fit
@pytest.mark.parametrize("case", marked(IN_FIT, QUICK_IN_FIT))
def test_fit_has_the_statistics_of_a_loop(found: Any, case: str) -> None:
    for rank, right in found:
        assert_close(rank[case][0], right["in_a_loop"])


def two_devices() -> Any:
    """Each process has two replicas, of which the last one of rank 1 has no samples."""
    take_default_threads()
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(cpu, logical)
    steps = parts(lambda _, replica: BATCH * int(replica != 3), 2 * RANKS)
    with gradring.init() as comm:
        case = Case(comm, devices=["CPU:0", "CPU:1"])
        distribute = case.strategy.experimental_distribute_values_from_function
        step = tf.function(lambda *batch: case.strategy.run(case.step, batch))
        for replicas in steps:
            own = replicas[2 * comm.rank : 2 * comm.rank + 2]
            step(
                *[
                    distribute(lambda at, of=of: of[at.replica_id_in_sync_group % 2])
                    for of in zip(*own, strict=True)
                ]
            )
        found = statistics_of(case.model)
    return found, expected(steps)


def test_replicas_of_one_process_combine_their_statistics() -> None:
    for found, right in run_ranks(two_devices, RANKS, timeout=240):
        assert_close(found, right)


def mobile_net(how: str) -> Any:
    """Collectives of each of four steps."""
    take_default_threads()
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with gradring.init() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            model = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=10)
            optimizer = keras.optimizers.SGD(0.01)
            loss_of = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        draw = np.random.default_rng(0)
        rows = draw.normal(size=(6 * BATCH, 32, 32, 3)), draw.integers(0, 10, 6 * BATCH)
        data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
        counts: list[int] = []

        def count(*_: Any, logs: Any = None) -> None:
            counts.append(comm.stats()["count"])

        def replica_step(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True)) / BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @tf.function  # type: ignore[untyped-decorator]
        def step(batch: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

        if how == "fit":
            model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
            after = keras.callbacks.LambdaCallback(on_train_batch_end=count)
            model.fit(data, verbose=0, callbacks=[after])
        else:
            for batch in strategy.experimental_distribute_dataset(data):
                step(batch)
                count()
    return np.diff(counts)[1:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loop", pytest.param("fit", marks=needs_fit)])
def test_a_step_of_a_real_model_is_its_buckets_and_two_collectives(how: str) -> None:
    # Whether there is a batch; two buckets, with the statistics of 52 layers; the loss or the logs.
    for counts in run_ranks(mobile_net, RANKS, how, timeout=600):
        assert counts == [4] * 4
