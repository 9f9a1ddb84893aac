"""Gradients of embeddings: the optimizer gets the rows that one process has.

Optimizers of Keras square rows of equal index one by one. So the weights tell whether such rows
were added up before.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import (
    BATCH,
    CAN_FIT,
    assert_trained_alike,
    needs_fit,
    state_of,
    strategy_of,
)
from support.tf_worker import join, refusal

# All optimizers are traced by two processes and by one before the first is judged.
pytestmark = pytest.mark.timeout(900)

#: Of the table, whose first words occur often.
ROWS, WIDTH = 9, 4
#: Of all ranks' rows in each step, how many are rank 0's.
ROWS_OF_FIRST = (5, 12, 0, 6)
ROWS_OF_ALL = 12

#: By name: the class of Keras 3, and its options.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "SGD, Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop, momentum": ("RMSprop", {"momentum": 0.5}),
    "Adagrad": ("Adagrad", {}),
    "Adadelta": ("Adadelta", {}),
    "Adam": ("Adam", {}),
    "AMSGrad": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "Adamax": ("Adamax", {}),
    "Nadam": ("Nadam", {}),
    "Ftrl": ("Ftrl", {}),
    "Lion": ("Lion", {}),
    "Adafactor": ("Adafactor", {}),
    "Lamb": ("Lamb", {}),
}
#: What Keras does with rows before an optimizer squares them.
BEFORE: dict[str, tuple[str, dict[str, Any]]] = {
    "clipnorm": ("Adam", {"clipnorm": 0.3}),
    "global_clipnorm": ("Adam", {"global_clipnorm": 0.3}),
    "clipvalue": ("Adam", {"clipvalue": 0.2}),
    "loss scale": ("Adam", {}),
    "accumulation": ("Adam", {"gradient_accumulation_steps": 2}),
}
#: Of tf_keras, which adds rows of equal index up by itself, once it has clipped them.
LEGACY: dict[str, tuple[str, dict[str, Any]]] = {
    "tf_keras SGD": ("SGD", {"momentum": 0.9}),
    "tf_keras RMSprop": ("RMSprop", {}),
    "tf_keras Adagrad": ("Adagrad", {}),
    "tf_keras Adam": ("Adam", {}),
    "tf_keras Adam, clipped": ("Adam", {"global_clipnorm": 0.3}),
}
#: Fails with rows of equal index in one process, too: a variance of rows becomes negative.
CENTRED: dict[str, tuple[str, dict[str, Any]]] = {
    "RMSprop, centred": ("RMSprop", {"centered": True})
}
ALL = OPTIMIZERS | BEFORE | LEGACY
HAS_LEGACY = importlib.util.find_spec("tf_keras") is not None
#: Adds gradients up over steps, and so in another order than one process.
IN_ANOTHER_ORDER = ("accumulation",)


def makes(name: str) -> Callable[[], Any] | None:
    """What makes an optimizer; None where this Keras has none of the kind."""
    import keras

    package: Any = keras
    if name in LEGACY:
        package = importlib.import_module("tf_keras") if HAS_LEGACY else None
    kind, options = (ALL | CENTRED)[name]
    found = getattr(package and package.optimizers, kind, None)
    if found is None:
        return None
    if name == "loss scale":
        return lambda: keras.optimizers.LossScaleOptimizer(found(0.02, **options))
    return lambda: found(0.02, **options)


def slices(indices: Any, values: Any) -> Any:
    import tensorflow as tf

    shape = tf.constant([ROWS, WIDTH])
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), shape)


def gradients(ranks: Sequence[int], factor: float = 1.0) -> Iterator[tuple[Any, Any]]:
    """Of each step, what these of two ranks have together: rows, and a dense gradient."""
    import tensorflow as tf

    for number, first in enumerate(ROWS_OF_FIRST):
        draw = np.random.default_rng(number)
        indices = draw.integers(0, ROWS // 2, ROWS_OF_ALL)
        values = draw.normal(size=(ROWS_OF_ALL, WIDTH)).astype(np.float32)
        dense = draw.normal(size=(2, WIDTH)).astype(np.float32)
        begin, end = (0 if 0 in ranks else first), (ROWS_OF_ALL if 1 in ranks else first)
        rows = slices(indices[begin:end], factor * values[begin:end])
        yield rows, tf.constant(factor * sum(dense[rank] for rank in ranks))


def made(make: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """An optimizer, and a table and a vector that it trains."""
    import tensorflow as tf

    draw = np.random.default_rng(7)
    table = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    variables = [tf.Variable(table, name="table"), tf.Variable(table[0], name="vector")]
    optimizer = make()
    optimizer.build(variables)
    return optimizer, variables


def state(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    own = optimizer.variables
    return [np.asarray(each) for each in (*variables, *(own() if callable(own) else own))]


def by_one(make: Callable[[], Any], given: Any = None) -> list[Any]:
    """By the optimizer alone, with the gradients of both ranks."""
    optimizer, variables = made(make)
    for each in given or gradients((0, 1)):
        optimizer.apply_gradients(list(zip(each, variables, strict=True)))
    return state(optimizer, variables)


def by_strategy(
    make: Callable[[], Any], ranks: Sequence[int], factor: float = 1.0, **options: Any
) -> list[Any]:
    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy(**options)
    with strategy.scope():
        optimizer, variables = made(make)
    for each in gradients(ranks, factor):
        pairs = list(zip(each, variables, strict=True))
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    return state(optimizer, variables)


def reducing(reduce: Callable[[Any, Any], Any], factor: float = 1.0) -> Any:
    """A way to train: what a function makes of the rank's gradients is applied."""

    def train(make: Callable[[], Any], rank: int) -> list[Any]:
        optimizer, variables = made(make)
        for each in gradients((rank,), factor):
            reduced = reduce(list(each), variables)
            optimizer.apply_gradients(list(zip(reduced, variables, strict=True)))
        return state(optimizer, variables)

    return train


def in_tape(given: Any, variables: Any) -> Any:
    """Gradients by Horovod's tape, of a loss that has these."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    (rows, dense), (table, vector) = given, variables
    with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
        taken = tf.gather(table, rows.indices)
        loss = tf.reduce_sum(taken * rows.values) + tf.reduce_sum(vector * dense)
    return tape.gradient(loss, variables)


def worker(names: Sequence[str], summed: Sequence[str], trained: Sequence[str]) -> Any:
    """All optimizers in all ways on this rank, or in one process."""
    import gradring.horovod.tensorflow as hvd
    from gradring.tensorflow import GradientReducer, all_reduce

    found: dict[Any, Any] = {}
    with join() as comm:
        for name in names:
            make = makes(name)
            if make is None:
                continue
            ranks = (0, 1) if comm.world_size == 1 else (comm.rank,)
            found[name, "strategy"] = by_strategy(make, ranks, communicator=comm)
            if comm.world_size == 1:
                found[name, "alone"] = by_one(make)
        for name in summed:
            make = makes(name)
            if make is None:
                continue
            if comm.world_size == 1:
                found[name, "alone, sum"] = by_one(make, each_word_once())
            else:
                found[name, "sum"] = by_strategy(
                    make, (comm.rank,), communicator=comm, embeddings="sum"
                )
        make = makes("Adam")
        assert make is not None
        if comm.world_size == 1:
            found["alone"] = by_one(make)
            found["alone, sum"] = by_one(make, each_word_once())
            found["strategy, sum"] = by_strategy(make, (0, 1), communicator=comm, embeddings="sum")
        else:
            found["parts"] = parts(comm)
            found["refused"] = refused(comm)
            found["clipped locally"] = clipped_locally(comm)
            found["norm"] = norm()
            hvd.init()
            mean, total = GradientReducer(), GradientReducer("sum", embeddings="sum")
            ways = {
                "reducer": reducing(mean, 2.0),
                "reducer, sum": reducing(total),
                "all_reduce": reducing(lambda given, _: all_reduce(given)),
                "all_reduce, sum": reducing(lambda given, _: all_reduce(given, embeddings="sum")),
                "horovod": reducing(in_tape),
            }
            for way, train in ways.items():
                found[way] = train(make, comm.rank)
            for way, (rule, embeddings) in RULES.items():
                # Each rank trains alone, or adds a part.
                local = isinstance(rule, updates.LocalSGD)
                found[way] = by_strategy(
                    make,
                    (0, 1) if local else (comm.rank,),
                    0.5 if local else 1.0,
                    communicator=comm,
                    update=rule,
                    embeddings=embeddings,
                )
                if isinstance(rule, updates.Primary):
                    # Only the chief's optimizer has a state before a synchronisation.
                    del found[way][2:]
        for name in trained:
            make = makes(name)
            if make is not None:
                found[name, "loop"] = by_loop(make, strategy_of(comm))
                if CAN_FIT:
                    found[name, "fit"] = by_fit(make, strategy_of(comm))
    return found


RULES: dict[str, tuple[updates.Rule, Any]] = {
    "strategy, sum": (updates.AllReduce(), "sum"),
    "primary": (updates.Primary(), "rows"),
    "primary, sum": (updates.Primary(), "sum"),
    "compressed": (updates.AllReduce(updates.TopK(0.5)), "rows"),
    "compressed, sum": (updates.AllReduce(updates.TopK(0.5)), "sum"),
    "local": (updates.LocalSGD(1), "rows"),
    "local, sum": (updates.LocalSGD(1), "sum"),
}
#: By optimizers that square rows, gradients that are those of one process.
WAYS = ("reducer", "all_reduce", "horovod", *(way for way in RULES if "sum" not in way))
SUMS = ("reducer, sum", "all_reduce, sum", *(way for way in RULES if "sum" in way))
#: What is trained in every run of the tests; fit and a loop trace for seconds each.
QUICK = ("Adam",)


def each_word_once() -> Iterator[tuple[Any, Any]]:
    for rows, dense in gradients((0, 1)):
        indices, places = np.unique(rows.indices, return_inverse=True)
        sums = np.zeros((indices.size, WIDTH), np.float32)
        np.add.at(sums, places, rows.values.numpy())
        yield slices(indices, sums), dense


def parts(comm: Any) -> dict[str, Any]:
    """What becomes of rows: their order, their mean, and no rows at all."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    def reduced(given: Any, op: Any, name: str) -> tuple[str, list[Any], list[int]]:
        result = all_reduce(given, op, name, comm)
        values = tf.cast(result.values, tf.float32).numpy()
        return result.values.dtype.name, values[:, 0].tolist(), result.indices.numpy().tolist()

    found: dict[str, Any] = {}
    indices = [[4, 4, 1], [1, 4]][comm.rank]
    for dtype in ("float32", "float16", "bfloat16", "int32"):
        values = tf.constant([[[3], [5], [7]], [[-3], [8]]][comm.rank], dtype)
        own = tf.IndexedSlices(values, tf.constant(indices, tf.int64), tf.constant([5, 1]))
        for op in ("sum", "mean"):
            found[f"{op} of {dtype}"] = reduced(own, op, "rows")
    # The table of so many rows would be fewer bytes.
    for name, count in (("of one rank", 2 * comm.rank), ("of none", 0), ("of many", 50)):
        own = tf.IndexedSlices(tf.ones([count, 1]), tf.zeros([count], tf.int32), [5, 1])
        found[name] = reduced(own, "mean", name)
    return found


def norm() -> float:
    """What is shown of two rows of one index."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow.keras import gradient_norm

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Embedding(2, 1)])
    model.compile("sgd", "mse")
    norms = gradient_norm.watch(model)
    rows = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([1, 1]), tf.constant([2, 1]))
    gradient_norm.note_reduced(model.optimizer, [rows])
    return float(norms.reduced)


def refused(comm: Any) -> dict[str, str]:
    """What is said where ranks want different things of rows."""
    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer

    own: Any = ("rows", "sum")[comm.rank]
    reduce_gradients = GradientReducer(communicator=comm.split(0), embeddings=own)
    (rows, _), *_ = gradients((comm.rank,))
    return {
        "strategy": refusal(lambda: CustomCollectiveStrategy(communicator=comm, embeddings=own)),
        "reducer": refusal(lambda: reduce_gradients([rows], ["table"])),
    }


def clipped_locally(comm: Any) -> list[Any]:
    """Rows of a worker that trains alone, clipped before they are applied."""
    make = makes("global_clipnorm")
    assert make is not None
    return by_strategy(make, (0, 1), 0.5, communicator=comm, update=updates.LocalSGD(1))


#: Words of the batches; a batch has each about ten times.
WORDS, STEPS = 20, 4


def words() -> Any:
    draw = np.random.default_rng(0)
    x = draw.integers(0, WORDS, (STEPS * BATCH, 8)).astype(np.int32)
    return x, draw.integers(0, 3, STEPS * BATCH)


def model_in(strategy: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    package = importlib.import_module(type(make()).__module__.partition(".")[0])
    with strategy.scope():
        layers = package.layers
        model = package.Sequential(
            [
                layers.Input((8,), dtype="int32"),
                layers.Embedding(WORDS, 8, embeddings_initializer=_waves),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3, kernel_initializer=_waves),
            ]
        )
        optimizer = make()
        optimizer.build(model.trainable_variables)
    return model, optimizer


def _waves(shape: Any, dtype: Any = None, **_: Any) -> Any:
    """An initializer for both packages, without chance."""
    import tensorflow as tf

    return tf.reshape(tf.sin(tf.range(1.0, float(np.prod(shape)) + 1.0)), shape)


def by_fit(make: Callable[[], Any], strategy: Any) -> Any:
    import tensorflow as tf

    model, optimizer = model_in(strategy, make)
    with strategy.scope():
        package = importlib.import_module(type(model).__module__.partition(".")[0])
        model.compile(optimizer, package.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices(words()).batch(BATCH)
    logs = model.fit(data, verbose=0).history
    return result_of(model, optimizer, logs)


def by_loop(make: Callable[[], Any], strategy: Any) -> Any:
    import tensorflow as tf

    model, optimizer = model_in(strategy, make)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / BATCH
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(list(zip(found, model.trainable_variables, strict=True)))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    data = tf.data.Dataset.from_tensor_slices(words()).batch(BATCH)
    losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(data)]
    return result_of(model, optimizer, {"loss": losses})


def result_of(model: Any, optimizer: Any, logs: Any) -> Any:
    own = optimizer.variables
    if callable(own):
        weights = [np.asarray(each) for each in model.get_weights()]
        return {"weights": weights, "optimizer": [np.asarray(v) for v in own()], "logs": logs}
    return {**state_of(model, optimizer), "logs": logs}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    """What two ranks have, and what one process has."""
    wanted = [chosen(request, argument) for argument in ("name", "summed", "trained")]
    workers = run_ranks(worker, 2, *wanted, timeout=850)
    (alone,) = run_ranks(worker, 1, *wanted, timeout=850)
    return workers, alone


def assert_same_bits(ours: list[Any], expected: list[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes(), f"{one} is not {other}"


def assert_close(ours: list[Any], expected: list[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def skip_if_missing(found: Any, key: Any) -> None:
    if key not in found:
        pytest.skip("this Keras has no such optimizer, or there is no tf_keras")


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_has_the_bits_of_one_process(found: Any, name: str) -> None:
    workers, alone = found
    skip_if_missing(alone, (name, "alone"))
    expected = alone[name, "alone"]
    same = assert_close if name in IN_ANOTHER_ORDER else assert_same_bits
    for worker in workers:
        same(worker[name, "strategy"], expected)
    assert_same_bits(alone[name, "strategy"], expected)


@pytest.mark.parametrize("summed", [*OPTIMIZERS, *CENTRED, *LEGACY])
def test_an_optimizer_has_the_sums_where_they_are_asked_for(found: Any, summed: str) -> None:
    workers, alone = found
    skip_if_missing(alone, (summed, "alone, sum"))
    for worker in workers:
        assert_close(worker[summed, "sum"], alone[summed, "alone, sum"])


@pytest.mark.parametrize("way", WAYS)
def test_rows_reach_the_optimizer_by_every_way(found: Any, way: str) -> None:
    workers, alone = found
    for worker in workers:
        assert_same_bits(worker[way], alone["alone"][: len(worker[way])])


@pytest.mark.parametrize("way", SUMS)
def test_sums_reach_the_optimizer_by_every_way(found: Any, way: str) -> None:
    workers, alone = found
    for worker in workers:
        assert_close(worker[way], alone["alone, sum"][: len(worker[way])])
    assert_close(alone["strategy, sum"], alone["alone, sum"])
    # The optimizer can tell.
    assert not np.allclose(alone["alone, sum"][0], alone["alone"][0], atol=1e-4)


def test_the_norm_that_clips_is_that_of_the_rows_of_one_process(found: Any) -> None:
    workers, alone = found
    skip_if_missing(alone, ("global_clipnorm", "alone"))
    for worker in workers:
        assert_same_bits(worker["clipped locally"], alone["global_clipnorm", "alone"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_rows_come_in_rank_order_and_a_mean_divides_each(found: Any, dtype: str) -> None:
    for worker in found[0]:
        parts = worker["parts"]
        assert parts[f"sum of {dtype}"] == (dtype, [3, 5, 7, -3, 8], [4, 4, 1, 1, 4])
        # Integers are rounded towards zero.
        mean = [1, 2, 3, -1, 4] if dtype == "int32" else [1.5, 2.5, 3.5, -1.5, 4]
        assert parts[f"mean of {dtype}"] == (dtype, mean, [4, 4, 1, 1, 4])


def test_ranks_may_have_no_rows_and_no_table_travels(found: Any) -> None:
    for worker in found[0]:
        assert worker["parts"]["of one rank"] == ("float32", [0.5] * 2, [0] * 2)
        assert worker["parts"]["of none"] == ("float32", [], [])
        assert worker["parts"]["of many"] == ("float32", [0.5] * 100, [0] * 100)


def test_the_norm_that_is_shown_is_that_of_the_sums(found: Any) -> None:
    for worker in found[0]:
        assert worker["norm"] == 7.0


def test_ranks_that_want_different_things_of_rows_are_told(found: Any) -> None:
    for worker in found[0]:
        said = worker["refused"]
        assert said["strategy"].startswith("MismatchError: rank 1 on ")
        assert "has embeddings=sum, and rank 0 on " in said["strategy"]
        assert "has embeddings=rows" in said["strategy"]
        assert said["reducer"].startswith("MismatchError: ")
        assert "table/rows' int64[1,2]" in said["reducer"]
        assert "table/rows, embeddings=sum'" in said["reducer"]


TRAINED = [name for name in ALL if name not in BEFORE]


def assert_all_trained_alike(found: Any, case: tuple[str, str]) -> None:
    workers, alone = found
    skip_if_missing(alone, case)
    assert_trained_alike([worker[case] for worker in workers], alone[case], 1e-6)


@pytest.mark.parametrize("trained", marked(TRAINED, QUICK))
def test_a_loop_trains_as_one_process(found: Any, trained: str) -> None:
    assert_all_trained_alike(found, (trained, "loop"))


@needs_fit
@pytest.mark.parametrize("trained", marked(TRAINED, QUICK))
def test_fit_trains_as_one_process(found: Any, trained: str) -> None:
    assert_all_trained_alike(found, (trained, "fit"))
