"""Refusals that one rank meets, and what works without others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_live_line import scalars_in

from gradring import updates
from gradring.testing import run_ranks

Found = dict[str, Any]

#: By what was tried, what the refusal says.
REFUSED = {
    "samples of a sum": "ValueError: samples weigh a mean, and have no meaning for op='sum'",
    "samples of each gradient": "ValueError: samples must be a scalar, and have the shape (2,)",
    "samples of integers": "TypeError: samples weigh gradients of floats, not of int32",
    "an unknown op": "ConfigError: op='average' is none of sum, mean, min, max, product; did you",
    "a group for an op": "product; give the group as communicator=",
    "a strategy for a group": "is no gradring.Communicator; give its attribute communicator",
    "a name for a group": "ConfigError: communicator='world' is no gradring.Communicator",
    "bytes below 0": "ConfigError: bucket_bytes=-1 is not a positive number; correct it",
    "a truth for bytes": "ConfigError: bucket_bytes=True is not a positive number; correct it",
    "an unknown check": "ConfigError: check_gradients=True is unknown; choose 'warn', 'raise' or",
    "an unknown way with rows": "ConfigError: embeddings='mean' is unknown; choose 'rows', which",
    "rows of a strategy": "ConfigError: embeddings=True is unknown; choose 'rows', which leaves",
    "a strategy of a strategy": "is no gradring.Communicator; give its attribute communicator",
    "a sum by a strategy": "is no gradring.Communicator; give its attribute communicator",
    "too many variables": "ValueError: 2 variables cannot have 1 gradients",
    "the highest row": "ValueError: table: op='max' does not exist for tf.IndexedSlices; use",
    "input for another strategy": "ConfigError: distribute_input needs a CustomCollectiveStrategy",
    "input that is a list": "TypeError: distribute_input: list is no tf.data.Dataset",
    "another place": "ConfigError: cluster_resolver makes this process rank 1 of 2, but the",
    "a task of no worker": "ConfigError: cluster_resolver says task_type='master', task_id=0; only",
    "a live line elsewhere": "ConfigError: LiveLine needs a model made in the scope of a",
    "a check elsewhere": "ConfigError: CheckReplicas needs a model made in the scope of a",
    "a commit in a graph": "ConfigError: a State can be committed only outside of a tf.function",
    "a number in a batch": "TypeError: join: a int without dimensions in a batch has no empty form",
    "a constraint": "ConfigError: weight has a constraint, which no server keeps to under update=",
    "no servers": "ConfigError: worker 0 of 1 cannot train under update=ParameterServer(",
    "a checkpoint below a file": "NotADirectoryError: ",
    "an optimizer beside no model": "an optimizer without variables, Adam, and 0 models, so its",
    "an optimizer beside two models": "an optimizer without variables, SGD, and 2 models, so its",
    "a gradient after the group": "LookupError: the communicator of this reduction is gone, so",
}


#: What every server tells when it ends.
COUNTED = "version 3, 2.0 MB sent"
EXACT = [-value for value in np.array([1.1, 2.2, 3.3], np.float32).tolist()]
#: By what was tried, what comes of it.
WORKS: Found = {
    # What cannot watch a model says so before it trains.
    "steps before the refusals": 0,
    # A collective without `init` joins the group.
    "without init": ([1.0, 2.0], 1, True),
    # A resolver that names no tasks leaves the place to the environment.
    "told nothing": [("worker", 0)] * 2,
    # One that agrees with the communicator is kept.
    "the same place": {"worker": ["node-a:1"]},
    # A strategy of one does what one of many does.
    "sums of nothing": [[], {}, ()],
    "a chief's update": (6.0, 4.0),
    "numbers": (4, 0.25, 0),
    "losses of samples": [4.0, 9.0],
    "an endless dataset": [1.0, 1.0],
    "a gradient": [6.0],
    # A loop with callbacks of Keras goes on from its backup.
    "restored": True,
    # Files that are not replaced are written as TensorFlow does.
    "read back": [1.0, 1.0],
    # A directory does not replace a file.
    "a directory over a file": "NotADirectoryError",
    "the file": "mine",
    # The state of an optimizer beside a sequential model is restored.
    "an optimizer beside its model": (2, [[-0.75], [-0.75]]),
    # A restored model leaves gradients of other weights out; the word occurs twice.
    "sums": [[0.0] * 3, [-1.5] * 3],
    "sums of an embedding": [[0.0] * 3, [-3.0, 0.0, 0.0]],
    # Nothing is compressed where nothing is sent.
    "uncompressed": [EXACT] * 3,
    # A worker without servers has counted nothing.
    "counted before a step": {},
    # A server tells what it has done.
    "ends": [
        COUNTED,
        f"{COUNTED}, 0 updates of 0 gradients",
        f"{COUNTED}, 3 updates of 4 gradients, 1 dropped late, 2 had to wait for room, "
        "staleness 0.50 on average, 1 at most",
    ],
}


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def on_one_rank(directory: str) -> Found:
    # In this order: the first makes the group, and the last closes it.
    comm, found = joined()
    found |= reductions(comm)
    found |= strategies(comm)
    found |= callbacks(comm, Path(directory))
    found |= files(comm, Path(directory))
    found |= rules(comm, Path(directory))
    return found | after_the_group(comm)


def joined() -> tuple[Any, Found]:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce
    from gradring.tensorflow.graph.ops import current_communicator

    total = all_reduce(tf.constant([1.0, 2.0]), "sum").numpy().tolist()
    comm = current_communicator()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        is_same = current_communicator() is comm
    return comm, {"without init": (total, comm.world_size, is_same)}


def reductions(comm: Any) -> Found:
    import tensorflow as tf

    from gradring.tensorflow import (
        CustomCollectiveStrategy,
        GradientReducer,
        all_reduce,
        distribute_input,
        join,
    )

    ours: Any = CustomCollectiveStrategy(communicator=comm)
    one, rows = [tf.constant([1.0])], tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    mean, numbers = GradientReducer(), tf.data.Dataset.range(2)
    other = tf.distribute.get_strategy()
    return {
        "samples of a sum": said(lambda: GradientReducer("sum")(one, samples=2)),
        "an unknown op": said(lambda: GradientReducer("average")),  # type: ignore[arg-type]
        "a group for an op": said(lambda: GradientReducer(comm)),
        "a strategy for a group": said(lambda: GradientReducer(communicator=ours)),
        "a name for a group": said(lambda: GradientReducer(communicator="world")),  # type: ignore[arg-type]
        "bytes below 0": said(lambda: GradientReducer(bucket_bytes=-1)),
        "a truth for bytes": said(lambda: GradientReducer(bucket_bytes=True)),
        "an unknown check": said(lambda: GradientReducer(check_gradients=True)),  # type: ignore[arg-type]
        "an unknown way with rows": said(lambda: GradientReducer(embeddings="mean")),  # type: ignore[arg-type]
        "rows of a strategy": said(
            lambda: CustomCollectiveStrategy(communicator=comm, embeddings=True)  # type: ignore[arg-type]
        ),
        "a strategy of a strategy": said(lambda: CustomCollectiveStrategy(communicator=ours)),
        "a sum by a strategy": said(lambda: all_reduce(one, communicator=ours)),
        "samples of each gradient": said(lambda: mean(one, samples=tf.constant([1, 2]))),
        "samples of integers": said(lambda: mean([tf.constant([1])], samples=2)),
        "too many variables": said(lambda: mean(one, ["a", "b"])),
        "the highest row": said(lambda: all_reduce(rows, "max", "table", comm)),
        "input for another strategy": said(lambda: distribute_input(numbers, other)),
        "input that is a list": said(lambda: distribute_input([1], comm)),
        "a number in a batch": said(lambda: next(join([{"x": tf.ones([2]), "n": 3}], comm))),
    }


def strategies(comm: Any) -> Found:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    kinds = tf.distribute.cluster_resolver

    def placed(*place: Any) -> Any:
        cluster = tf.train.ClusterSpec({"worker": ["node-a:1", "node-b:1"][: place[2]]})
        resolver = kinds.SimpleClusterResolver(cluster, task_type=place[0], task_id=place[1])
        return CustomCollectiveStrategy(resolver, communicator=comm)

    empty = kinds.TFConfigClusterResolver()
    by_empty = [CustomCollectiveStrategy(empty, communicator=comm), CustomCollectiveStrategy(empty)]
    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.25)

    def assigning(x: Any) -> Any:
        weight.assign_add(x)
        return x * 2.0

    doubled = strategy.broadcast_update(assigning, tf.constant(3.0))
    labels, outputs = tf.constant([[0.0], [1.0]]), tf.constant([[2.0], [4.0]])
    per_sample = keras.losses.MeanSquaredError(reduction="none")
    nothing: Any = ([], {}, ())
    endless = tf.data.Dataset.from_tensors(tf.ones([2])).repeat()
    batch = iter(strategy.experimental_distribute_dataset(endless)).get_next_as_optional()
    return {
        "another place": said(lambda: placed("worker", 1, 2)),
        "a task of no worker": said(lambda: placed("master", 0, 2)),
        "the same place": placed("worker", 0, 1).cluster_resolver.cluster_spec().as_dict(),
        "told nothing": [
            (each.cluster_resolver.task_type, each.cluster_resolver.task_id) for each in by_empty
        ],
        "sums of nothing": [strategy.reduce("SUM", nest, axis=None) for nest in nothing],
        "a chief's update": (float(doubled), float(weight)),
        "numbers": (int(weight), float(optimizer.learning_rate), int(optimizer.iterations)),
        "losses of samples": strategy.run(lambda: per_sample(labels, outputs)).numpy().tolist(),
        "an endless dataset": batch.get_value().numpy().tolist(),
    }


def callbacks(comm: Any, directory: Path) -> Found:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, elastic
    from gradring.tensorflow.callbacks import CheckReplicas, LiveLine

    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)

    def model_in(scope: Any) -> Any:
        with scope:
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    elsewhere = model_in(contextlib.nullcontext())
    found: Found = {}
    for name, it in (("a live line elsewhere", LiveLine()), ("a check elsewhere", CheckReplicas())):
        found[name] = said(partial(elsewhere.fit, data, verbose=0, callbacks=[it]))
    found["steps before the refusals"] = int(elsewhere.optimizer.iterations)

    strategy = CustomCollectiveStrategy(communicator=comm)
    model = model_in(strategy.scope())
    state = elastic.State(model=model, step=0)
    found["a commit in a graph"] = said(tf.function(state.commit, autograph=False))
    line = LiveLine()
    model.evaluate(data, verbose=0, callbacks=[line])
    model.fit(data, verbose=0, callbacks=[line])
    model.evaluate(data, verbose=0, callbacks=[line])
    line = LiveLine(every_steps=1, tensorboard=directory / "scalars")
    model.fit(data, verbose=0, callbacks=[line])
    found["scalars"] = set(scalars_in(directory / "scalars"))

    def trained(*given: Any) -> Any:
        """A loop of one's own, of one step, that calls Keras' callbacks."""
        called = keras.callbacks.CallbackList(list(given), model=model)
        called.on_train_begin()
        begun = model.get_weights()
        called.on_epoch_begin(0)
        logs = model.train_on_batch(x, y, return_dict=True)
        called.on_train_batch_end(0, logs)
        called.on_epoch_end(0, logs)
        return begun, model.get_weights()

    (directory / "file").write_text("")
    below = keras.callbacks.ModelCheckpoint(
        directory / "file" / "model.weights.h5", save_weights_only=True
    )
    found["a checkpoint below a file"] = said(lambda: trained(below))
    _, kept = trained(keras.callbacks.BackupAndRestore(directory / "backup"))
    trained()
    begun, _ = trained(keras.callbacks.BackupAndRestore(directory / "backup"))
    found["restored"] = all(np.array_equal(*pair) for pair in zip(kept, begun, strict=True))
    return found


def files(comm: Any, directory: Path) -> Found:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, restore, save

    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        weight = tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(weight=weight)

    def read(path: Any) -> float:
        weight.assign(0.0)
        checkpoint.read(path).assert_consumed()
        return float(weight.numpy())

    in_graph = tf.function(lambda: checkpoint.write(str(directory / "graph")))
    read_back = [
        read(in_graph().numpy().decode()),
        read(checkpoint.write("ram://one-rank/weight")),
    ]
    (directory / "model").mkdir()
    (directory / "model" / "variables").write_text("mine")
    refused = said(lambda: tf.saved_model.save(checkpoint, str(directory / "model")))

    def trained(steps: int) -> Any:
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        for _ in range(steps):
            gradients = [tf.ones_like(each) for each in model.trainable_variables]
            pairs = list(zip(gradients, model.trainable_variables, strict=True))
            strategy.run(lambda pairs=pairs, it=optimizer: it.apply_gradients(pairs))
        return tf.train.Checkpoint(model=model, optimizer=optimizer)

    save(trained(2), directory / "trained")
    fresh = trained(0)
    restore(fresh, directory / "trained")
    weight.assign(1.0)
    beside_none = tf.train.Checkpoint(weight=weight, optimizer=keras.optimizers.Adam())
    beside_two = tf.train.Checkpoint(first=trained(0), second=trained(0))
    momentums = [np.unique(np.asarray(each)).tolist() for each in fresh.optimizer.variables[2:]]
    return {
        "read back": read_back,
        "a directory over a file": refused.partition(":")[0],
        "the file": (directory / "model" / "variables").read_text(),
        **{
            f"an optimizer beside {name}": said(partial(restore, it, directory / "trained"))
            for name, it in (("no model", beside_none), ("two models", beside_two))
        },
        "an optimizer beside its model": (int(fresh.optimizer.iterations.numpy()), momentums),
    }


def rules(comm: Any, directory: Path) -> Found:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, restore, save

    def stepping(rule: Any, optimizer: Any = None, **variable: Any) -> Any:
        """A module with one variable, and what applies a gradient to it."""
        strategy = CustomCollectiveStrategy(
            update=rule, communicator=None if isinstance(rule, updates.ParameterServer) else comm
        )
        module = tf.Module()
        with strategy.scope():
            module.weight = tf.Variable(tf.zeros([3, 1]), name="weight", **variable)
            optimizer = optimizer or keras.optimizers.SGD(1.0)
            optimizer.build([module.weight])

        def step(gradient: Any) -> Any:
            strategy.run(lambda: optimizer.apply_gradients([(gradient, module.weight)]))
            return module.weight.numpy().ravel().tolist()

        return strategy, module, step

    def word(value: float) -> Any:
        """Of an embedding, a word that occurs twice."""
        return tf.IndexedSlices(tf.fill([2, 1], value), tf.constant([0, 0]), tf.constant([3, 1]))

    def interrupted(gradient: Callable[[float], Any], name: str) -> list[Any]:
        """A sum of two steps whose first is void, as a checkpoint is restored after it."""
        _, module, step = stepping(updates.AllReduce(sync_every=2))
        save(module, directory / name)
        step(gradient(100.0))
        restore(module, directory / name)
        return [step(gradient(1.0)), step(gradient(2.0))]

    dense = tf.constant([[1.1], [2.2], [3.3]])
    compressions = (updates.Int8(), updates.TopK(0.4), updates.PowerSGD(1))
    served, _, step = stepping(
        updates.ParameterServer(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    )
    counted = served.update_stats()
    served.leave()
    positive = keras.constraints.NonNeg()
    return {
        "sums": interrupted(lambda value: tf.fill([3, 1], value), "dense"),
        "sums of an embedding": interrupted(word, "embedding"),
        "uncompressed": [stepping(updates.AllReduce(it))[2](dense) for it in compressions],
        "counted before a step": counted,
        "ends": ends(),
        "no servers": said(lambda: step(dense)),
        "a constraint": said(lambda: stepping(updates.ParameterServer(), constraint=positive)),
    }


def ends() -> list[str]:
    """The last lines of a server that is not the first, of an unused one, and of a used one."""
    from gradring.tensorflow.cluster.serving import summary

    nothing = ("dropped_late", "dropped_overflow", "dropped_lost", "updates", "pushes")
    stats: Any = {**dict.fromkeys(nothing, 0), "held_overflow": 0, "staleness": {}}
    stats |= {"server": 0, "optimizers": 1, "version": 3, "bytes_sent": 2_000_000}
    used: Any = {"updates": 3, "pushes": 4, "dropped_late": 1, "held_overflow": 2}
    each: Any = ({"server": 1}, {}, {**used, "staleness": {0: 2, 1: 2}})
    return [summary(stats | one) for one in each]


def after_the_group(comm: Any) -> Found:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    x = tf.constant([3.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = all_reduce(x * x, "sum", "x", comm)
    while_open = tape.gradient(y, x).numpy().tolist()
    comm.close()
    return {
        "a gradient": while_open,
        "a gradient after the group": said(lambda: tape.gradient(y, x)),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    (found,) = run_ranks(on_one_rank, 1, str(tmp_path_factory.mktemp("one rank")))
    return dict(found)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_is_wrong(found: Found, name: str) -> None:
    assert REFUSED[name] in found[name]


@pytest.mark.parametrize("name", WORKS)
def test_what_needs_no_other_rank_works(found: Found, name: str) -> None:
    assert found[name] == WORKS[name]


def test_scalars_of_a_live_line_have_a_norm_only_where_it_was_asked_for(found: Found) -> None:
    assert {"gradring/loss", "gradring/rank_0/loss"} <= found["scalars"]
    assert "gradring/gradient_norm" not in found["scalars"]
