"""Programs of Horovod train two ranks as one process trains on both ranks' batches."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.tf_worker import take_one_thread

Found = dict[str, Any]

STEPS, ROWS = 8, 4


def batches() -> list[Any]:
    """Of both ranks together."""
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS, 2 * ROWS, 3)).astype("float32")
    return list(zip(x, x[..., :1] - 2 * x[..., 1:2], strict=True))


def train_all() -> Found:
    import gradring.horovod.tensorflow.keras as hvd

    take_one_thread()
    hvd.init()
    found: Found = {"tape": by_tape(), "accumulated": by_accumulation(), "overflows": overflown()}
    found |= {**by_fit(), **fitted_again(), **local_layers(), **state()}
    hvd.shutdown()
    return found


def model_of(rank: int) -> Any:
    """Each rank begins with other weights."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(rank)
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])


def mine(batch: Any) -> Any:
    """This rank's rows of a batch."""
    import gradring.horovod.tensorflow as hvd

    rows = slice(hvd.rank() * ROWS, (hvd.rank() + 1) * ROWS)
    return tuple(part[rows] for part in batch)


def weights_of(model: Any) -> list[Any]:
    return [np.asarray(weight) for weight in model.get_weights()]


def by_tape() -> Any:
    """A custom loop, and the same on the whole batches in this process."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    def train(model: Any, share: Any, wrap: Any) -> Any:
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = wrap(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        in_graph = tf.function(step)
        for number, batch in enumerate(batches()):
            (in_graph if number % 2 else step)(*map(tf.constant, share(batch)))
        return weights_of(model)

    model = model_of(hvd.rank())
    hvd.broadcast_variables(model.variables, root_rank=1)
    distributed = train(model, mine, hvd.DistributedGradientTape)
    return distributed, train(model_of(1), lambda batch: batch, lambda tape: tape)


def by_accumulation() -> Any:
    """Two batches are a step; the same with batches of twice the size."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    def fit(optimizer: Any, pairs: list[Any]) -> Any:
        model = model_of(0)
        model.compile(optimizer, "mse")
        for x, y in pairs:
            model.train_on_batch(x, y)
        return weights_of(model), int(model.optimizer.iterations)

    sgd = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    distributed = hvd.DistributedOptimizer(
        sgd, backward_passes_per_step=2, average_aggregated_gradients=True
    )
    whole = batches()
    doubled = [
        tuple(map(np.concatenate, zip(*whole[i : i + 2], strict=True))) for i in range(0, STEPS, 2)
    ]
    return fit(distributed, [mine(batch) for batch in whole]), fit(sgd, doubled)


def overflown() -> Any:
    """The gradients of one rank overflow in a step; one process never sees that batch."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    def train(optimizer: Any, pairs: list[Any]) -> Any:
        model = model_of(0)
        scaling = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8.0)
        model.compile(scaling, "mse")
        for x, y in pairs:
            model.train_on_batch(x, y)
        return weights_of(model)

    sgd, whole = tf.keras.optimizers.SGD(0.1, momentum=0.9), batches()
    own = [mine(batch) for batch in whole]
    if hvd.rank() == 1:
        own[2] = own[2][0] * np.inf, own[2][1]
    return train(hvd.DistributedOptimizer(sgd), own), train(sgd, whole[:2] + whole[3:])


def by_fit() -> Found:
    import tensorflow as tf

    import gradring.horovod.tensorflow.keras as hvd

    rate = 0.1
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(rate))
    again = optimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    with pytest.raises(ValueError, match="SGD is distributed already"):
        hvd.DistributedOptimizer(again)
    model = model_of(hvd.rank())
    model.compile(optimizer, "mse")
    x, y = (np.concatenate(parts) for parts in zip(*map(mine, batches()), strict=True))
    callbacks = hvd.callbacks
    history = model.fit(
        x,
        y,
        batch_size=ROWS,
        shuffle=False,
        epochs=4,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
            callbacks.LearningRateScheduleCallback(rate, 0.5, start_epoch=2),
        ],
    ).history
    with tempfile.TemporaryDirectory() as directory:
        model.save(Path(directory, "model.keras"))
        loaded = hvd.load_model(Path(directory, "model.keras"))
    loaded.train_on_batch(x[:ROWS], y[:ROWS])
    steps = int(loaded.optimizer.iterations) - int(model.optimizer.iterations)
    return {
        "fit": weights_of(model),
        "history": history,
        "loaded": weights_of(loaded),
        "steps of loaded": steps,
    }


def fitted_again() -> Found:
    """Ranks have other weights again before a second `fit`, as one that has joined has."""
    import tensorflow as tf

    import gradring.horovod.tensorflow.keras as hvd

    model = model_of(hvd.rank())
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    for _ in range(2):
        model.set_weights(weights_of(model_of(hvd.rank())))
        model.fit(*mine(batches()[0]), epochs=1, verbose=0, callbacks=callbacks)
    return {"fitted again": weights_of(model)}


def local_layers() -> Found:
    """The first layer keeps its gradients, divided by the number of ranks."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    model = model_of(0)
    x, y = mine(batches()[0])
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    plain = [each.numpy() for each in tape.gradient(loss, model.trainable_variables)]
    partial = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    pairs = partial.get_local_and_global_gradients(loss, model.trainable_variables)
    return {"plain": plain, "partial": [[g.numpy() for _, g in some] for some in pairs]}


def state() -> Found:
    import tensorflow as tf

    import gradring.horovod.tensorflow.keras as hvd

    model = model_of(hvd.rank())
    optimizer = tf.keras.optimizers.Adam()
    state = hvd.elastic.KerasState(model, optimizer, batch=20 + hvd.rank(), epoch=hvd.rank())
    state.sync()
    assert state.model is model and state.optimizer is optimizer
    synced = weights_of(model), state.batch, state.epoch
    state.batch = 30
    state.restore()

    @hvd.elastic.run
    def train(state: Any) -> int:
        state.batch += 1
        state.commit()
        return int(state.batch)

    sums = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(tf.keras.mixed_precision.LossScaleOptimizer(sums), "mse")
    begun = hvd.elastic.KerasState(model)
    model.train_on_batch(*mine(batches()[0]))
    left = [int(model.optimizer.inner_optimizer._sums().counter)]
    begun.restore()
    left.append(int(model.optimizer.inner_optimizer._sums().counter))
    return {
        "synced": synced,
        "restored": state.batch,
        "trained": train(state),
        "left": left,
    }


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def ranks(request: pytest.FixtureRequest) -> list[Found]:
    if request.param == "keras":
        return run_ranks(train_all, 2)
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("needs tf_keras")
    return run_ranks(train_all, 2, env={"TF_USE_LEGACY_KERAS": "1"})


def close(ones: list[Any], others: list[Any]) -> None:
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_tape_and_an_accumulating_optimizer_train_as_one_process(ranks: list[Found]) -> None:
    for found in ranks:
        close(*found["tape"])
        (weights, steps), (alone, _) = found["accumulated"]
        close(weights, alone)
        assert steps == STEPS
    for one, other in zip(ranks[0]["tape"][0], ranks[1]["tape"][0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_ranks_skip_a_step_in_which_one_overflows(ranks: list[Found]) -> None:
    for found in ranks:
        close(*found["overflows"])


def test_fit_keeps_ranks_equal_and_follows_the_callbacks(ranks: list[Found]) -> None:
    first, second = ranks
    for one, other in zip(first["fit"], second["fit"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert first["history"] == second["history"]
    assert first["history"]["loss"][-1] < first["history"]["loss"][0]
    np.testing.assert_allclose(first["history"]["lr"], [0.075, 0.1, 0.1, 0.05], rtol=1e-6)


def test_every_fit_begins_with_the_roots_variables(ranks: list[Found]) -> None:
    for one, other in zip(*(found["fitted again"] for found in ranks), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loaded_model_goes_on_with_all_ranks_gradients(ranks: list[Found]) -> None:
    first, second = ranks
    for one, other, before in zip(first["loaded"], second["loaded"], first["fit"], strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one != before).any()
    assert first["steps of loaded"] == second["steps of loaded"] == 1


def test_gradients_of_local_layers_stay(ranks: list[Found]) -> None:
    mean = [(a + b) / 2 for a, b in zip(ranks[0]["plain"], ranks[1]["plain"], strict=True)]
    for found in ranks:
        local, reduced = found["partial"]
        close(local, [gradient / 2 for gradient in found["plain"][:2]])
        close(reduced, mean[2:])


def test_a_state_is_that_of_rank_0_and_goes_back(ranks: list[Found]) -> None:
    for found in ranks:
        weights, batch, epoch = found["synced"]
        close(weights, ranks[0]["synced"][0])
        assert (batch, epoch, found["restored"], found["trained"]) == (20, 0, 20, 21)


def test_a_state_that_goes_back_drops_what_a_step_has_added_up(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["left"] == [1, 0]


def lose_one() -> Any:
    import os

    import gradring.horovod.tensorflow as hvd

    hvd.init()
    state = hvd.elastic.State(step=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> Any:
        while state.step < 6:
            if state.step == 3 and hvd.rank() == 1:
                os._exit(1)
            hvd.allreduce(1.0)
            state.step += 1
            state.commit()
        return state.step, hvd.size(), resets

    return train(state)


def test_a_rank_is_lost_and_the_reset_callbacks_hear_of_it() -> None:
    left, _lost = run_ranks(lose_one, 2, check=False)
    assert left.value == (6, 1, [1])


#: The first process waits for another one, at steps without a commit.
WAITING = """
import tensorflow as tf
import gradring.horovod.tensorflow as hvd

hvd.init()
rate = tf.Variable(0.1 * hvd.size())
state = hvd.elastic.TensorFlowState([rate], step=0)


def adjust():
    rate.assign(0.1 * hvd.size())
    hvd.allreduce(rate)


@hvd.elastic.run
def train(state):
    try:
        while hvd.size() == 1:
            state.step += 1
            state.check_host_updates()
    except hvd.elastic.HostsUpdatedInterrupt:
        print("was at", state.step, flush=True)
        raise
    steps = hvd.allgather_object((state.step, round(float(rate), 3)))
    print("are at", *steps[hvd.rank()], steps[0] == steps[1], flush=True)


state.register_reset_callbacks([adjust])
train(state)
"""


@pytest.mark.slow
def test_a_rank_that_joins_is_told_of_the_change_like_the_others(tmp_path: Path) -> None:
    program = tmp_path / "waiting.py"
    program.write_text(WAITING)
    run = [sys.executable, "-m", "gradring", "run", "-np", "1", "--max-np", "2"]
    command = [*run, "--hosts", "localhost:2", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    steps = said[-1].removeprefix("was at ")
    assert said == [f"are at {steps} 0.2 True"] * 2 + [f"was at {steps}"]


def state_alone() -> Any:
    import gradring.horovod.tensorflow as hvd

    class OfItsOwn(hvd.elastic.ObjectState):
        def sync(self, communicator: Any = None) -> None:
            """Would not be called."""

    hvd.init()
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=1)
    state.check_host_updates()
    state.step = 2
    state.save()
    state.step = 3
    state.restore()
    said = []
    for wrong in ({"best": (1, 2)}, {"best": {"of": np.ones(2)}}, {"check_host_updates": 1}):
        with pytest.raises((TypeError, ValueError)) as refused:
            hvd.elastic.ObjectState(**wrong)
        said.append(str(refused.value))
    with pytest.raises(ValueError, match=r"OfItsOwn overrides sync\(\)"):
        hvd.elastic.run(lambda _: None)(OfItsOwn(step=1))
    return state.step, said


def test_a_state_is_saved_alone_and_what_it_cannot_keep_is_refused() -> None:
    ((step, said),) = run_ranks(state_alone, 1)
    assert step == 2
    assert "convert tuples to lists" in said[0] and "its own name" in said[1]
    assert "cannot be called 'check_host_updates'" in said[2]


def track_commits() -> Any:
    import tensorflow as tf

    import gradring.horovod.tensorflow.keras as hvd

    take_one_thread()
    hvd.init()
    model = model_of(0)
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, commits=0)

    class Counting(hvd.elastic.CommitStateCallback):
        def commit(self) -> None:
            self.state.commits += 1
            super().commit()

    x, y = (np.concatenate(parts) for parts in zip(*batches(), strict=True))
    callbacks = [hvd.elastic.UpdateEpochStateCallback(state), Counting(state, 3)]
    model.fit(x, y, batch_size=2 * ROWS, epochs=2, verbose=0, callbacks=callbacks)
    state.restore()
    # The epochs of a later `fit` may be counted from the first one or from 0.
    model.fit(x, y, initial_epoch=2, epochs=5, verbose=0, callbacks=callbacks[:1])
    model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks[:1])
    assert state.epoch == 7, state.epoch
    state.restore()
    return state.epoch, state.commits, is_half_a_step_forgotten(x[:ROWS], y[:ROWS])


def is_half_a_step_forgotten(x: Any, y: Any) -> bool:
    """Whether an optimizer of two batches for a step begins with the first one after a restore."""
    import tensorflow as tf

    import gradring.horovod.tensorflow.keras as hvd
    from gradring.horovod.tensorflow import elastic

    found = []
    for kind in ("TensorFlowKerasState", "State", "TensorFlowState"):
        model = model_of(0)
        sgd = tf.keras.optimizers.SGD(0.1)
        model.compile(hvd.DistributedOptimizer(sgd, backward_passes_per_step=2), "mse")
        # The last kind knows variables, and no optimizer.
        kept = model.weights if kind == "TensorFlowState" else model
        state = getattr(elastic, kind)(kept)
        before = weights_of(model)
        model.train_on_batch(x, y)
        state.restore()
        model.train_on_batch(x, y)
        between = weights_of(model)
        model.train_on_batch(x, y)
        changed = not np.array_equal(before[0], weights_of(model)[0])
        found.append(changed and all(map(np.array_equal, before, between)))
    return all(found)


def test_commits_may_do_more_and_a_restored_state_has_half_of_no_step() -> None:
    # Commits come after 3 and 6 of 8 batches, and at the end of an epoch.
    assert run_ranks(track_commits, 1) == [(2, 6, True)]
