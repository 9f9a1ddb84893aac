"""Training with parameter servers: one job of three workers, with everything in it."""

from __future__ import annotations

import io
import os
import re
import tempfile
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import gradring
from gradring import updates
from gradring.errors import AbortedError, ConfigError
from gradring.observe import metrics
from gradring.observe.observer import observer_of
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import (
    BATCH,
    STEPS,
    compiled,
    dataset,
    make_model,
    make_optimizer,
    needs_fit,
    samples,
    strategy_of,
)
from support.served import RATE, one_weight, served, serving
from support.tf_worker import join
from support.waiting import wait_until

pytestmark = needs_fit

MANY_STEPS = 200
TABLE_ROWS = 1 << 16
OPTIMIZERS = ("SGD", "SGD momentum", "Adam", "RMSprop", "Nadam", "Ftrl")
#: In graphs TensorFlow divides by its roots in another way, which rounds otherwise.
ROUNDED = ("RMSprop",)
#: The one with the most state, besides RMSprop.
QUICK = ("Adam",)
ASYNCHRONOUS = updates.ParameterServer(staleness=None)


def job(optimizers: list[str]) -> dict[str, Any]:
    with join(reproducible=True) as comm:
        return {
            "alone": {name: trained(None, name) for name in optimizers if comm.rank == 0},
            "all-reduce": {name: trained(strategy_of(comm), name) for name in optimizers},
            "synchronous": {name: by_servers(comm, name) for name in optimizers},
            "rows": rows(comm),
            "pulled rows": pulled_rows(comm),
            "counted": counted(comm),
            "began": began(comm),
            "seen": seen(comm),
            "found": found(comm),
            "refused": refused(comm),
        }


def trained(strategy: Any, optimizer: str) -> Any:
    """The weights after many steps of a custom loop."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model = make_model("mlp")
        applied_by = make_optimizer(optimizer)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    x, y = samples()

    def replica_step(places: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = model(tf.gather(x, places), training=True)
            loss = loss_of(tf.gather(y, places), outputs) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        applied_by.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def steps(batches: Any) -> None:
        for places in batches:
            strategy.run(replica_step, args=(places,))

    places = tf.data.Dataset.range(len(x)).repeat().batch(BATCH).take(MANY_STEPS)
    steps(strategy.experimental_distribute_dataset(places))
    return [np.asarray(weight) for weight in model.get_weights()]


def by_servers(comm: Any, optimizer: str) -> Any:
    with served(comm, updates.ParameterServer()) as strategy:
        return trained(strategy, optimizer)


def rows(comm: Any) -> Any:
    """Embeddings on a server of their own, with all that an optimizer may have; and by fit."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    def fitted(strategy: Any) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = compiled(strategy, "embedding", "SGD")
            schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
            optimizer = keras.optimizers.AdamW(schedule, amsgrad=True, weight_decay=0.02)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            model.compile(optimizer, model.loss, metrics=["accuracy"])
        logs = model.fit(
            dataset(words=True), verbose=0, validation_data=dataset(words=True)
        ).history
        return {
            "weights": [np.asarray(weight) for weight in model.get_weights()],
            "logs": logs,
            "evaluated": model.evaluate(dataset(words=True), verbose=0),
            "predicted": model.predict(dataset(words=True), verbose=0),
        }

    # Servers add up rows of equal index.
    reduced = fitted(CustomCollectiveStrategy(communicator=comm, embeddings="sum"))
    with tempfile.TemporaryDirectory() as snapshots:
        placement = {"embeddings": 1, "kernel": 0}
        rule = updates.ParameterServer(placement=placement, snapshots=snapshots)
        with served(comm, rule, servers=2) as strategy:
            pushed = fitted(strategy)
            stats = strategy.update_stats()
    return {"reduced": reduced, "pushed": pushed, "stats": stats}


def pulled_rows(comm: Any) -> Any:
    """A table of which each step changes a few rows, in a graph and eagerly; all sums are exact."""
    import keras
    import tensorflow as tf

    with served(comm, updates.ParameterServer(), servers=2) as strategy:
        with strategy.scope():
            table = tf.Variable(tf.zeros([TABLE_ROWS, 8]), name="table")
            bias = tf.Variable(tf.zeros([3]), name="bias")
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([table, bias])

        def step(words: Any) -> Any:
            # TensorFlow may write the difference where the slice is.
            before = table[:16]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, words)) + tf.reduce_sum(bias)
            gradients = tape.gradient(loss, [table, bias])
            optimizer.apply_gradients(zip(gradients, [table, bias], strict=True))
            return table[:16] - before

        def words_of(number: int, rank: int) -> list[int]:
            return [number, number, 2 + rank, 4099 * number % TABLE_ROWS, TABLE_ROWS - 1]

        expected, wrong = np.zeros([TABLE_ROWS, 8], np.float32), []
        graph = tf.function(lambda words: strategy.run(step, args=(words,)))
        for number in range(12):
            held = table.read_value()
            take = graph if number % 4 else (lambda words: strategy.run(step, args=(words,)))
            moved = take(tf.constant(words_of(number, comm.rank)))
            after = expected.copy()
            for rank in range(comm.world_size):
                np.subtract.at(after, words_of(number, rank), 1)
            wrong += [
                (number, name)
                for name, found, right in (
                    ("held", held, expected),
                    ("moved", moved, (after - expected)[:16]),
                    ("table", table, after),
                    ("bias", bias, np.full(3, -comm.world_size * (number + 1.0))),
                )
                if not np.array_equal(found.numpy(), right)
            ]
            expected = after
        received = strategy.update_stats()["bytes_received"]
    return wrong, received / expected.nbytes


def in_pieces() -> Any:
    """Backward passes that wait in the middle until a gradient has left; one fails there.

    Returns the variables after each step.
    """
    import keras
    import tensorflow as tf

    from gradring.tensorflow.rules import served_optimizer

    # One of the threads waits in the backward pass.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    served_optimizer.PIECE_BYTES = 1024
    with gradring.init() as comm, served(comm, updates.ParameterServer(), servers=2) as strategy:
        with strategy.scope():
            first, last = tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([1 << 16]))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([first, last])
        sent = [0]
        fails = [False]

        def bytes_sent() -> Any:
            return strategy.update_stats().get("bytes_sent", 0)

        def has_left(gradient: Any) -> Any:
            wait_until(lambda: bytes_sent() >= sent[0] + 4 * (1 << 16), "the last one has left")
            if fails[0]:
                raise ValueError("the backward pass failed")
            return gradient

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def middle(x: Any) -> Any:
            def backward(gradient: Any) -> Any:
                return tf.ensure_shape(tf.numpy_function(has_left, [gradient], tf.float32), [3])

            return tf.identity(x), backward

        def replica_step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(middle(first)) + tf.reduce_sum(last)
            gradients = tape.gradient(loss, [first, last])
            optimizer.apply_gradients(zip(gradients, [first, last], strict=True))

        step = tf.function(lambda: strategy.run(replica_step))
        seen = []
        for number in range(4):
            fails[0] = number == 2 and comm.rank == 0
            if fails[0]:
                with pytest.raises(tf.errors.OpError, match="the backward pass failed"):
                    step()
                fails[0] = False
            sent[0] = bytes_sent()
            step()
            seen.append([{*first.numpy().tolist()}, {*last.numpy().tolist()}])
    return seen


def counted(comm: Any) -> Any:
    """Known gradients under each rule: the weight that comes of it, and what server 0 counted."""

    def moved(rule: updates.ParameterServer) -> Any:
        with serving(comm, rule) as counted_there:
            from gradring.tensorflow import CustomCollectiveStrategy

            strategy = CustomCollectiveStrategy(update=rule)
            weight, step = one_weight(strategy, replicas=comm.world_size)
            for _ in range(STEPS):
                step()
            strategy.leave()
        return float(weight.numpy()[0]), strategy.update_stats(), counted_there

    rules = (
        updates.ParameterServer(),
        ASYNCHRONOUS,
        updates.ParameterServer(staleness=2, late="compensate"),
        updates.ParameterServer(staleness=None, aggregate=2, overflow="drop_oldest"),
        updates.ParameterServer(backup=1, late="drop"),
    )
    return [moved(rule) for rule in rules]


def seen(comm: Any) -> Any:
    """What a monitor, TensorBoard and Prometheus show of asynchronous updates."""
    from gradring.tensorflow import CustomCollectiveStrategy

    lines, rows, made = io.StringIO(), list[Any](), list[Any]()
    with serving(comm, ASYNCHRONOUS, made=made):
        strategy = CustomCollectiveStrategy(update=ASYNCHRONOUS)
        _, train = one_weight(strategy)
        monitor = gradring.Monitor(strategy, every_steps=1, stream=lines, on_line=rows.append)

        def step() -> None:
            train()
            monitor.step()

        for _ in range(3):
            step()
        wait_until(lambda: strategy.update_stats()["servers"]["staleness"], "the server has told")
        step()
        of_servers = [metrics.render_server(one.stats()) for one in made]
        own = metrics.render(
            strategy.communicator, None, comm.rank, observer_of(strategy.communicator).updates()
        )
        strategy.leave()
    return lines.getvalue(), rows[-1], own, of_servers


def found(comm: Any) -> Any:
    """Whether calls that name no group mean the program's, beside a strategy that has none.

    And the ops of a step that run Python or exchange with servers.
    """
    import tensorflow as tf

    from gradring.tensorflow.graph.ops import current_communicator

    with served(comm, ASYNCHRONOUS) as strategy:
        with strategy.scope():
            inside = current_communicator() is strategy.communicator
        _, step = one_weight(strategy)
        step()
        operations = tf.function(step).get_concrete_function().graph.get_operations()
        kinds = [op.type for op in operations if op.type.startswith(("Gradring", "Py", "EagerPy"))]
    outside = current_communicator() is comm
    with comm.split(0), pytest.raises(ConfigError, match="2 communicators are open"):
        current_communicator()
    return inside, outside, kinds


def began(comm: Any) -> Any:
    """Workers with other initial weights, eagerly: all train those of one of them."""
    with served(comm, updates.ParameterServer()) as strategy:
        weight, step = one_weight(strategy, initial=float(comm.rank))
        seen = []
        for _ in range(3):
            step()
            seen.append(float(weight.numpy()[0]))
    return seen


def refused(comm: Any) -> Any:
    """What a strategy says to what servers cannot do, and once it has left."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    said: dict[str, str] = {}

    def says(name: str, kind: type[Exception], act: Any) -> None:
        with pytest.raises(kind) as caught:
            act()
        said[name] = str(caught.value)

    def strategy(**options: Any) -> Any:
        return CustomCollectiveStrategy(update=options.pop("rule", ASYNCHRONOUS), **options)

    says("no servers", ConfigError, strategy)
    says("group", ConfigError, lambda: strategy(communicator=comm))
    with serving(comm, ASYNCHRONOUS):
        elsewhere = updates.ParameterServer(placement={"kernel": 1})
        says("server", ConfigError, lambda: strategy(rule=elsewhere))
        says("check", ConfigError, lambda: strategy(check_gradients="warn"))
        ours = strategy()

        def training(optimizer: Any, **options: Any) -> Any:
            with ours.scope():
                weight = tf.Variable([1.0], **options)

            def step() -> None:
                ours.run(lambda: optimizer.apply_gradients([(tf.ones_like(weight), weight)]))

            step.weight = weight  # type: ignore[attr-defined]
            return step

        says("optimizer", ConfigError, training(keras.optimizers.Lamb()))
        inherited = type("Mine", (keras.optimizers.RMSprop,), {})()
        says("subclass", ConfigError, training(inherited))
        says("average", ConfigError, training(keras.optimizers.SGD(use_ema=True)))
        says("dtype", ConfigError, training(keras.optimizers.SGD(), dtype=tf.complex64))
        step = training(keras.optimizers.SGD())
        step()
        pulled = step.weight.numpy()
        step.weight.assign(pulled + 1)
        says("set", ConfigError, step)
        says("set in a graph", ConfigError, tf.function(step))
        step.weight.assign(pulled)
        ours.leave()
        says("left", AbortedError, step)
        os.environ["TF_CONFIG"] = os.environ["TF_CONFIG"].replace(
            f'"task": {{"type": "worker", "index": {comm.rank}}}',
            '"task": {"type": "ps", "index": 0}',
        )
        says("rule", ConfigError, lambda: CustomCollectiveStrategy(update=updates.Primary()))
    return said


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    return run_ranks(job, 3, chosen(request, "optimizer"), timeout=280)


def test_servers_at_other_addresses_are_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradring.tensorflow.cluster.serving import config_of

    def job_of(*addresses: str) -> str:
        return config_of(list(addresses)).job

    assert job_of("a:1", "b:1") == job_of("a:1", "b:1") != job_of("a:1", "c:1")
    monkeypatch.setenv("GRADRING_JOB_ID", "mine")
    assert job_of("a:1", "b:1") == "mine"


@pytest.mark.parametrize("optimizer", marked(OPTIMIZERS, QUICK))
def test_synchronous_updates_have_the_bits_of_an_all_reduce(ranks: Any, optimizer: str) -> None:
    for rank in ranks:
        expected = ranks[0]["all-reduce"][optimizer]
        for ours, theirs in zip(rank["synchronous"][optimizer], expected, strict=True):
            if optimizer in ROUNDED:
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
            else:
                assert ours.tobytes() == theirs.tobytes()
    for ours, alone in zip(expected, ranks[0]["alone"][optimizer], strict=True):
        np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-5)


def test_rows_schedules_decay_and_placement_train_as_an_all_reduce_does(ranks: Any) -> None:
    for rank in ranks:
        pushed, reduced = rank["rows"]["pushed"], ranks[0]["rows"]["reduced"]
        for ours, theirs in zip(pushed["weights"], reduced["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        # The first push is that of initial weights.
        assert rank["rows"]["stats"]["version"] == STEPS + 1


def test_tables_that_change_by_rows_are_right_and_few_rows_are_pulled(ranks: Any) -> None:
    for rank in ranks:
        wrong, tables_received = rank["pulled rows"]
        assert not wrong
        # The first pulls are whole.
        assert tables_received < 3.5


def test_each_worker_evaluates_and_predicts_all_data(ranks: Any) -> None:
    for rank in ranks:
        pushed, reduced = rank["rows"]["pushed"], rank["rows"]["reduced"]
        np.testing.assert_allclose(pushed["evaluated"], reduced["evaluated"], atol=1e-5)
        assert pushed["predicted"].shape == (STEPS * BATCH, 3)
        np.testing.assert_allclose(pushed["predicted"], ranks[0]["rows"]["pushed"]["predicted"])


def test_updates_are_what_the_rule_says(ranks: Any) -> None:
    """The server counts from nothing after the initial weights."""
    by_rule = zip(*(rank["counted"] for rank in ranks), strict=True)
    synchronous, each, bounded, queue, backup = by_rule

    def last(those: Any) -> Any:
        """The weight of the newest version that a worker has, and server 0's count."""
        weight, _, _ = max(those, key=lambda one: one[1]["version"])
        return weight, those[0][2][0]

    weight, stats = last(synchronous)
    assert weight == 1 - RATE * STEPS
    assert stats["version"] - 1 == STEPS
    for those in (each, bounded):
        _, stats = last(those)
        # The first batch of a worker that comes when others have begun counts for nothing.
        counting = [3 * STEPS - late for late in range(3)]
        assert stats["version"] - 1 in counting
        assert sum(stats["staleness"].values()) - (stats["version"] - 1) in (0, 1)
    _, stats = last(queue)
    assert stats["version"] - 1 + stats["dropped_overflow"] // 2 >= STEPS
    _, stats = last(backup)
    assert stats["version"] - 1 >= STEPS
    for those in (synchronous, each, bounded, queue, backup):
        assert_counts_agree(those)


def assert_counts_agree(those: Any) -> None:
    """Each gradient of a worker is in an update or dropped, as the worker and server 0 count."""
    clients, stats = [client for _, client, _ in those], those[0][2][0]
    dropped = sum(stats[f"dropped_{why}"] for why in ("late", "overflow", "lost"))
    assert all(client["pushes"] >= STEPS - 1 for client in clients)
    assert sum(client["pushes"] for client in clients) == stats["pushes"] + dropped
    assert sum(client["dropped"] for client in clients) == dropped
    assert not any(client["unsettled"] for client in clients)
    assert (stats["updates"], sum(stats["staleness"].values())) == (
        stats["version"] - 1,
        stats["pushes"],
    )


def test_staleness_queue_and_drops_are_seen(ranks: Any) -> None:
    for index, rank in enumerate(ranks):
        lines, row, own, of_servers = rank["seen"]
        last = lines.splitlines()[-1]
        assert re.search(r"version \d+, staleness [\d.]+, at most \d+, \d queued, 0 dropped$", last)
        assert list(row["ranks"]) == [str(index)]
        assert set(row["updates"]) == {"version", "staleness", "staleness_max", "queue", "dropped"}
        assert row["ranks"][str(index)]["wait_ms"] > 0
        families = {each.name: each for each in text_string_to_metric_families(own)}
        assert families["gradring_version"].samples[0].value == row["updates"]["version"]
        assert families["gradring_pushes"].samples[0].labels == {"rank": str(index)}
        for text in of_servers:
            families = {each.name: each for each in text_string_to_metric_families(text)}
            assert families["gradring_gradient_staleness"].type == "histogram"
            fates = {one.labels["fate"] for one in families["gradring_gradients"].samples}
            assert fates == {"applied", "late", "overflow", "lost"}


def test_calls_that_name_no_group_mean_that_of_the_program(ranks: Any) -> None:
    assert [rank["found"][:2] for rank in ranks] == [(True, True)] * 3


def test_gradients_leave_before_the_backward_pass_ends_and_count_once() -> None:
    expected = [[{-2.0 * step}] * 2 for step in (1, 2, 3, 4)]
    assert run_ranks(in_pieces, 2) == [expected] * 2


def test_a_step_exchanges_with_servers_without_python(ranks: Any) -> None:
    ops = ["GradringPushOpen", "GradringPushPiece", "GradringPush", "GradringPull"]
    assert [rank["found"][2] for rank in ranks] == [ops] * 3


def test_workers_that_begin_with_other_weights_take_those_of_one(ranks: Any) -> None:
    each = RATE * 3
    found = [rank["began"] for rank in ranks]
    first = next(rank for rank in range(3) if found[rank][0] == rank - RATE)
    # In the first update there is only the gradient of the worker whose weights they are.
    after = first - RATE
    assert found == [[after, after - each, after - 2 * each]] * 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no servers", "needs parameter servers, and worker 0 of 3 knows none: start them by"),
        ("group", "workers of parameter servers form no group; leave communicator= out"),
        ("server", "placement has 'kernel' on server 1, and there are 1, counted from 0"),
        ("check", "check_gradients='warn' looks at gradients that are reduced"),
        ("optimizer", "parameter servers do not know Lamb; they know SGD, RMSprop, Adam, AdamW,"),
        ("subclass", "parameter servers do not know Mine; they know SGD, RMSprop, Adam, AdamW,"),
        ("average", "use_ema=True of"),
        ("dtype", "is complex64, and servers keep float32, float64, bfloat16, float16 under"),
        ("set", ": Variable was set since the last step, and the servers do not have its new"),
        ("set in a graph", "set or load weights before the first step of a job"),
        ("left", "closed"),
        ("rule", "this process is ps 0 of TF_CONFIG, and update=Primary(sync_every=1) has no par"),
    ],
)
def test_what_servers_cannot_do_is_refused_and_named(ranks: Any, what: str, words: str) -> None:
    assert words in ranks[0]["refused"][what]
