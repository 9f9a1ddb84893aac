"""Horovod's functions in graphs that sessions of TensorFlow 1 run, with two ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks

Found = dict[str, Any]

STEPS, ROWS = 6, 4

#: TensorFlow's defaults, whatever the tests' environment says: its optimizers merge ops.
DEFAULTS = {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@contextlib.contextmanager
def graph(threads: int = 0) -> Iterator[Any]:
    """A new graph; inside, what makes a session of it, with so many threads of each kind."""
    import tensorflow as tf

    v1 = tf.compat.v1
    config = v1.ConfigProto(
        inter_op_parallelism_threads=threads, intra_op_parallelism_threads=threads
    )
    with tf.Graph().as_default():
        yield lambda: v1.Session(config=config)


def of_two_ranks(*parts: str) -> Found:
    """Runs the functions of these names on one rank, in a process that all of them share."""
    import gradring.horovod.tensorflow as hvd

    if "old" in parts:
        import tensorflow as tf

        tf.compat.v1.disable_v2_behavior()
    hvd.init()
    found = {part: globals()[part]() for part in parts}
    hvd.shutdown()
    return found


def old() -> Any:
    """What programs see that have switched off all that came with TensorFlow 2."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    with graph(), pytest.raises(NotImplementedError, match=r"enable_control_flow_v2\(\) before"):
        tf.cond(tf.constant(True), lambda: hvd.allreduce(1.0), lambda: 1.0)
    return {"training": training(), "accumulated": accumulated()}


def calls() -> Found:
    """Each function, its gradient, and what is fed."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    rank = hvd.rank()
    with graph(threads=1) as session:
        x = tf.compat.v1.placeholder(tf.float32, [2, 2])
        functions: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: hvd.allreduce(x, op=hvd.Sum),
            "grouped": lambda: hvd.grouped_allreduce([x, x[0] * 3])[1],
            "allgather": lambda: hvd.allgather(x[: 2 - rank]),
            "broadcast": lambda: hvd.broadcast(x, 1),
            "alltoall": lambda: hvd.alltoall(x, [1, 1])[0],
            "reducescatter": lambda: hvd.reducescatter(x, op=hvd.Sum),
            "in a function": lambda: tf.function(hvd.allreduce)(x),
            "in a branch": lambda: tf.cond(x[0, 0] < 9, lambda: hvd.allreduce(x), lambda: x),
        }
        results = {name: function() for name, function in functions.items()}
        slices = tf.IndexedSlices(x, [rank, 3], tf.constant([4, 2]))
        places = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]
        gradients = {
            name: tf.gradients(tf.reduce_sum(result * result), x)[0]
            for name, result in results.items()
        }
        with session() as run:
            fed = {x: np.array([[1, 2], [3, 4]]) + 4 * rank}
            found = {
                "places": run.run(places),
                "results": run.run(results, fed),
                "gradients": run.run(gradients, fed),
                "each": {name: run.run(result, fed) for name, result in results.items()},
                "rows": run.run(tf.convert_to_tensor(hvd.allreduce(slices)), fed),
                "fed result": run.run(results["allreduce"] + 1, {results["allreduce"]: x_like()}),
                "callables": callables(run, results["broadcast"], x, fed[x]),
            }
            with pytest.raises(NotImplementedError, match=r"use Session\.run"):
                handle = run.partial_run_setup([results["allreduce"]], [x])
                run.partial_run(handle, results["allreduce"], fed)
            found["objects"] = hvd.broadcast_object(rank, 1), hvd.allgather_object(rank)
        exported = tf.compat.v1.train.export_meta_graph()
    with graph() as session:
        tf.compat.v1.train.import_meta_graph(exported)
        rank_op, reduced = (f"{tensor.op.name}:0" for tensor in (places[0], results["allreduce"]))
        with session() as run:
            assert run.run(rank_op) == rank
            with pytest.raises(tf.errors.InvalidArgumentError, match="executed_by_Session_run"):
                run.run(reduced, {x.name: x_like()})
    return found


def callables(run: Any, broadcast: Any, x: Any, fed: Any) -> list[Any]:
    """What each kind of callable returns: with a feed, without, and that of Keras' old backend."""
    import tensorflow as tf
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    import gradring.horovod.tensorflow as hvd

    total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)
    options = CallableOptions(fetch=[broadcast.name, "doubled:0"], feed=[x.name])
    tf.multiply(x, 2, "doubled")
    keras = run._make_callable_from_options(options)
    return [
        run.make_callable(broadcast, [x])(fed),
        run.make_callable(total)(),
        *[keras(fed.astype("float32")) for _ in range(2)],
    ]


def x_like() -> Any:
    return np.zeros([2, 2], "float32")


def convolutions() -> tuple[Any, Any, Any]:
    """Input, labels and loss of a model whose backward pass oneDNN rewrites."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    v1 = tf.compat.v1
    v1.set_random_seed(hvd.rank())
    x, y = v1.placeholder(tf.float32, [None, 8, 8, 3]), v1.placeholder(tf.float32, [None, 2])
    initial = v1.random_uniform_initializer(-0.3, 0.3)
    hidden = x
    for number, (before, filters) in enumerate([(3, 16), (16, 64)]):
        kernel = v1.get_variable(f"kernel{number}", [3, 3, before, filters], initializer=initial)
        bias = v1.get_variable(f"bias{number}", [filters], initializer=initial)
        hidden = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(hidden, kernel, 2, "SAME"), bias))
    last = v1.get_variable("last", [64, 2], initializer=initial)
    return x, y, tf.reduce_mean((tf.reduce_mean(hidden, [1, 2]) @ last - y) ** 2)


def batches() -> list[Any]:
    """Of both ranks together."""
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS, 2 * ROWS, 8, 8, 3)).astype("float32")
    return list(zip(x, x.mean((2, 3))[..., :2] * 9, strict=True))


def mine(batch: Any) -> Any:
    """This rank's rows of a batch."""
    import gradring.horovod.tensorflow as hvd

    return tuple(part[hvd.rank() * ROWS :][:ROWS] for part in batch)


def trained(
    shares: list[Any], wrap: Callable[[Any], Any], begin: Callable[[Any], None], average: Any
) -> Any:
    """Losses of the steps, weights in the end, and the global step."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with graph() as session:
        x, y, loss = convolutions()
        step = v1.train.get_or_create_global_step()
        train = wrap(v1.train.AdamOptimizer(0.01)).minimize(loss, global_step=step)
        shown = average(loss)
        with session() as run:
            run.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            begin(run)
            losses = [run.run([shown, train], {x: xs, y: ys})[0] for xs, ys in shares]
            return losses, run.run(v1.trainable_variables()), int(run.run(step))


def training() -> Any:
    """By a session, and by one process on the batches of both ranks."""
    return by_both({}, batches())


def accumulated() -> Any:
    """Two passes are a step; alone, with batches of twice the size."""
    whole = batches()
    pairs = [zip(*whole[i : i + 2], strict=True) for i in range(0, STEPS, 2)]
    doubled = [tuple(map(np.concatenate, pair)) for pair in pairs]
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    return by_both(passes, doubled)


def by_both(settings: Found, whole: list[Any]) -> Any:
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    v1, initial = tf.compat.v1, []

    def broadcast(run: Any) -> None:
        run.run(hvd.broadcast_global_variables(1))
        initial.extend(run.run(v1.trainable_variables()))

    def load(run: Any) -> None:
        for variable, value in zip(v1.trainable_variables(), initial, strict=True):
            variable.load(value, run)

    def wrap(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, **settings)

    distributed = trained([mine(batch) for batch in batches()], wrap, broadcast, hvd.allreduce)
    alone = trained(whole, lambda optimizer: optimizer, load, lambda loss: loss)
    return distributed, alone


def two_losses() -> Any:
    """A graph with a training op for each of two players, which share the weights' order."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    v1, rank = tf.compat.v1, hvd.rank()
    with graph(threads=1) as session:
        weights = [v1.get_variable(name, initializer=float(rank)) for name in ("d", "g")]
        begin = hvd.broadcast_global_variables(1)
        x = v1.placeholder(tf.float32, [])
        train = []
        for one, other in (weights, weights[::-1]):
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
            loss = (one - tf.stop_gradient(other) - x) ** 2
            train.append(optimizer.minimize(loss, var_list=[one]))
        norm = hvd.allreduce(weights[0] * 2)
        with session() as run:
            run.run(v1.global_variables_initializer())
            run.run(begin)
            found = [run.run(weights)]
            for turn in (0, 1, 1, 0):
                run.run(train[turn], {x: 2.0 * rank})
                found.append(run.run(weights))
            found.append(run.run([norm, *train], {x: 2.0 * rank})[0])
    return found


def refused() -> dict[str, Any]:
    """What differs between ranks, and what no session takes; the group goes on."""
    import gradring.horovod.tensorflow as hvd

    said: dict[str, Any] = {**unlike_runs(), **unlike_runs_of_what_was_traced_before()}
    optimizers_that_are_refused()
    loops_that_are_refused()
    said["sessions"] = sessions_of_one_that_loses_its_server()
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)
    return said


def unlike_runs() -> dict[str, str]:
    import tensorflow as tf

    import gradring
    import gradring.horovod.tensorflow as hvd

    rank = hvd.rank()
    said: dict[str, str] = {}
    with graph() as session:
        a, b = (hvd.allreduce(tf.ones([2]), op=hvd.Sum, name=name) for name in "ab")
        asked = {
            "subset": [a, b][rank],
            "more": [a, [a, b]][rank],
            "shape": hvd.allreduce(tf.ones([17 + rank])),
            "dtype": hvd.allgather(tf.ones([2], tf.int32 if rank else tf.float32)),
            "root": hvd.broadcast(tf.ones([2]), rank),
        }
        with session() as run:
            for name, fetches in asked.items():
                with pytest.raises(gradring.errors.MismatchError) as caught:
                    run.run(fetches)
                assert isinstance(caught.value, tf.errors.FailedPreconditionError)
                assert caught.value.rank == 1
                said[name] = str(caught.value)
                assert run.run(a).tolist() == [2.0, 2.0]
    return said


def optimizers_that_are_refused() -> None:
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    v1 = tf.compat.v1
    with graph():
        optimizer = v1.train.GradientDescentOptimizer(0.5)
        table = v1.get_variable("table", initializer=tf.ones([4, 2]))
        rows = tf.reduce_sum(tf.gather(table, [1]))
        with pytest.raises(ValueError, match="pass sparse_as_dense=True"):
            hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2).minimize(rows)
        distributed = hvd.DistributedOptimizer(optimizer)
        with pytest.raises(ValueError, match="DistributedGradientDescentOptimizer is distributed"):
            hvd.DistributedOptimizer(distributed)
        distributed = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        distributed.minimize(tf.reduce_sum(table))
        with pytest.raises(NotImplementedError, match="an optimizer of its own for each loss"):
            distributed.minimize(tf.reduce_sum(table * table))
        with pytest.raises(NotImplementedError, match="of Keras would not reduce"):
            hvd.DistributedOptimizer(tf.keras.optimizers.SGD())
    with tf.Graph().as_default():
        distributed.minimize(v1.get_variable("table", initializer=tf.ones([4, 2])) ** 2)
    with pytest.raises(ValueError, match="adds gradients up in a graph"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)


def loops_that_are_refused() -> None:
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    with graph(), pytest.raises(NotImplementedError, match=r"into a tf\.function"):
        one = tf.constant(0)
        tf.while_loop(lambda i: i < 2, lambda i: hvd.allreduce(i, op=hvd.Sum), [one])


def unlike_runs_of_what_was_traced_before() -> dict[str, str]:
    import tensorflow as tf

    import gradring
    import gradring.horovod.tensorflow as hvd

    with graph() as session:
        traced = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="again"))
        first = traced(tf.ones([2]))
        second = tf.function(lambda x: traced(x) + 1)(tf.ones([2]))
        with pytest.raises(NotImplementedError, match=r"'again'.* into a tf\.function"):
            tf.cond(first[0] < 9, lambda: traced(tf.ones([2])), lambda: tf.ones([2]))
        with pytest.raises(NotImplementedError, match=r"'again'.* into a tf\.function"):
            tf.while_loop(lambda x: x[0] < 9, lambda x: traced(x), [tf.ones([2])])
        with session() as run:
            with pytest.raises(gradring.errors.MismatchError) as caught:
                run.run([second, [first, second]][hvd.rank()])
            assert run.run(second).tolist() == [3.0, 3.0]
    return {"traced before": str(caught.value)}


def sessions_of_one_that_loses_its_server() -> int:
    """How many sessions a `MonitoredSession` makes that is told once that a server is gone."""
    import tensorflow as tf

    class GoneOnce(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
        sessions = 0

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.sessions += 1

        def before_run(self, run_context: Any) -> None:
            if self.sessions == 1:
                raise tf.errors.AbortedError(None, None, "the server is gone")

    hook = GoneOnce()
    with graph():
        one = tf.ones([])
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as run:
            run.run(one)
    return hook.sessions


def one_at_a_time() -> str:
    """Another thread's run, while one is under way."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    begun, over = threading.Event(), threading.Event()

    def wait(x: Any) -> Any:
        begun.set()
        over.wait()
        return x

    with graph() as session:
        slow = hvd.allreduce(tf.numpy_function(wait, [tf.ones([])], tf.float32), name="slow")
        quick = hvd.allreduce(tf.ones([]), name="quick")
        slow.set_shape([])
        with session() as run:
            thread = threading.Thread(target=run.run, args=(slow,))
            thread.start()
            begun.wait()
            with pytest.raises(RuntimeError, match="about to run 'quick' while") as caught:
                run.run(quick)
            over.set()
            thread.join()
            run.run(quick)
    return str(caught.value)


def joins() -> Any:
    """Rank 0 has two runs more than rank 1."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    with graph() as session:
        sums = [hvd.allreduce(tf.ones([2]), op=hvd.Sum), hvd.allreduce(tf.ones([3]))]
        rows, last = hvd.allgather(tf.ones([2])), hvd.join()
        with session() as run:
            found = [run.run(sums) for _ in range(3 - 2 * hvd.rank())][-1]
            if hvd.rank() == 0:
                with pytest.raises(tf.errors.FailedPreconditionError, match="has called join"):
                    run.run(rows)
            return found, int(run.run(last)), run.run(rows).tolist()


def monitored() -> Any:
    """Trains, and goes on from what the chief has saved."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    v1, train = tf.compat.v1, tf.compat.v1.train
    directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    found = []
    for last in (3, 6):
        with graph():
            x, y, loss = convolutions()
            step = train.get_or_create_global_step()
            optimizer = hvd.DistributedOptimizer(train.MomentumOptimizer(0.05, 0.9))
            minimize = optimizer.minimize(loss, global_step=step)
            weights = v1.trainable_variables()
            hooks = [hvd.BroadcastGlobalVariablesHook(0), train.StopAtStepHook(last_step=last)]
            where = directory if hvd.rank() == 0 else None
            with train.MonitoredTrainingSession(checkpoint_dir=where, hooks=hooks) as run:
                seen = [run.run(step)]
                for batch in batches()[seen[0] :]:
                    values, _ = run.run(
                        [weights, minimize], dict(zip((x, y), mine(batch), strict=True))
                    )
                    if run.should_stop():
                        break
            found.append((int(seen[0]), values))
    return found, sorted(path.name for path in Path(directory).glob("*.index"))


def killed(how: str) -> Any:
    """Rank 1 dies in the middle of training; rank 0 returns what it saw, and how it went on."""
    import tensorflow as tf

    import gradring
    import gradring.horovod.tensorflow as hvd

    v1, train = tf.compat.v1, tf.compat.v1.train
    hvd.init()
    with graph() as session:
        x, y, loss = convolutions()
        minimize = hvd.DistributedOptimizer(train.AdamOptimizer(0.01)).minimize(loss)
        hook = hvd.BroadcastGlobalVariablesHook(0)
        opened = train.MonitoredTrainingSession(hooks=[hook]) if how == "monitored" else session()
        caught = []
        with opened as run:
            if how == "session":
                run.run(v1.global_variables_initializer())
            for number, batch in enumerate(batches() * 3):
                if number == 3 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    run.run(minimize, dict(zip((x, y), mine(batch), strict=True)))
                except gradring.errors.PeerLostError as error:
                    assert isinstance(error, tf.errors.AbortedError)
                    caught.append((number, error.rank, str(error)))
                    if how == "session":
                        again = run.run(v1.trainable_variables())
                        assert len(again) == 5
                    break
    return caught


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    parts = ["calls", "training", "accumulated", "two_losses", "refused"]
    parts += ["one_at_a_time", "joins", "monitored"]
    found: list[Any] = run_ranks(of_two_ranks, 2, *parts, env=DEFAULTS)
    return found


@pytest.fixture(scope="module")
def old_ranks() -> list[Any]:
    found: list[Any] = run_ranks(of_two_ranks, 2, "old", env=DEFAULTS)
    return [each["old"] for each in found]


X = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])]
EXPECTED: dict[str, Callable[[int], Any]] = {
    "allreduce": lambda rank: X[0] + X[1],
    "grouped": lambda rank: (X[0][0] + X[1][0]) * 1.5,
    "allgather": lambda rank: np.concatenate([X[0], X[1][:1]]),
    "broadcast": lambda rank: X[1],
    "alltoall": lambda rank: np.stack([X[0][rank], X[1][rank]]),
    "reducescatter": lambda rank: (X[0] + X[1])[rank : rank + 1],
    "in a function": lambda rank: (X[0] + X[1]) / 2,
    "in a branch": lambda rank: (X[0] + X[1]) / 2,
}
#: Of the sum of the squares. Horovod averages what comes back of a mean, a gathering or a
#: broadcast; rank 1 gathers its first row alone.
GRADIENTS: dict[str, Callable[[int], Any]] = {
    "allreduce": lambda rank: 4 * (X[0] + X[1]),
    "grouped": lambda rank: np.stack([9 * (X[0][0] + X[1][0]), np.zeros(2)]),
    "allgather": lambda rank: np.array([[2.0], [2.0 * (1 - rank)]]) * X[rank],
    "broadcast": lambda rank: 2.0 * rank * X[1],
    "alltoall": lambda rank: 2 * X[rank],
    "reducescatter": lambda rank: 4 * (X[0] + X[1]),
    "in a function": lambda rank: X[0] + X[1],
    "in a branch": lambda rank: X[0] + X[1],
}


def test_what_a_session_runs_is_what_horovod_defines(ranks: list[Any]) -> None:
    for rank, found in enumerate(each["calls"] for each in ranks):
        assert found["places"] == [rank, 2, rank, 2]
        for name, expected in EXPECTED.items():
            np.testing.assert_array_equal(found["results"][name], expected(rank), name)
            np.testing.assert_array_equal(found["each"][name], expected(rank), name)
            gradient = found["gradients"][name]
            np.testing.assert_array_equal(gradient, GRADIENTS[name](rank), name)
        fed, alone, *keras = found["callables"]
        np.testing.assert_array_equal(fed, X[1])
        assert alone.tolist() == [3.0]
        for shared, own in keras:
            np.testing.assert_array_equal(shared, X[1])
            np.testing.assert_array_equal(own, 2 * X[rank])
        np.testing.assert_array_equal(found["fed result"], np.ones([2, 2]))
        rows = np.zeros([4, 2])
        rows[0], rows[1], rows[3] = X[0][0] / 2, X[1][0] / 2, (X[0][1] + X[1][1]) / 2
        np.testing.assert_array_equal(found["rows"], rows)
        assert found["objects"] == (1, [0, 1])


@pytest.mark.parametrize("name", ["training", "accumulated"])
@pytest.mark.parametrize("behaviour", ["ranks", "old_ranks"])
def test_ranks_train_as_one_process_does(
    request: pytest.FixtureRequest, name: str, behaviour: str
) -> None:
    found = [each[name] for each in request.getfixturevalue(behaviour)]
    (losses, weights, step), (alone_losses, alone, alone_step) = found[0]
    assert step == STEPS and alone_step == (STEPS if name == "training" else STEPS // 2)
    for ours, theirs, one in zip(weights, found[1][0][1], alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, one, atol=1e-6)
    assert losses == found[1][0][0]
    if name == "training":
        np.testing.assert_allclose(losses, alone_losses, rtol=1e-5)
        assert losses[-1] < losses[0]


def test_each_run_executes_what_it_is_asked_for_and_nothing_else(ranks: list[Any]) -> None:
    # Both begin with 1. A step goes halfway from one's own weight to the other's plus 1, twice.
    d, g = 1.0, 1.0
    expected: list[Any] = [[d, g]]
    for turn in (0, 1, 1, 0):
        d, g = (g + 1, g) if turn == 0 else (d, d + 1)
        expected.append([d, g])
    for rank in ranks:
        *steps, norm = rank["two_losses"]
        assert steps == expected
        assert norm == 2 * d


def test_ranks_that_run_different_things_are_told_which_and_go_on(ranks: list[Any]) -> None:
    assert ranks[0]["refused"] == ranks[1]["refused"]
    said = ranks[0]["refused"]
    assert "'again'" in said["traced before"]
    # The group goes on, so other errors are TensorFlow's to recover from.
    assert said["sessions"] == 2
    run = "calls a run of a session with"
    assert f"{run} allreduce (sum) 'a' float32[2]" in said["subset"]
    assert f"{run} allreduce (sum) 'b' float32[2]" in said["subset"]
    assert "a run of a session without more, and" in said["more"]
    for name, words in {
        "shape": ("float32[17]", "float32[18]"),
        "dtype": ("float32[any]", "int32[any]"),
        "root": ("root 0", "root 1"),
    }.items():
        assert all(word in said[name] for word in words), said[name]


def test_two_threads_do_not_run_collectives_at_the_same_time(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "give each thread its own communicator" in rank["one_at_a_time"]


def test_a_run_goes_on_without_ranks_that_have_joined(ranks: list[Any]) -> None:
    (sums, means), *_ = ranks[0]["joins"]
    assert (sums.tolist(), means.tolist()) == ([1, 1], [0.5, 0.5, 0.5])
    for found in ranks:
        _, last, rows = found["joins"]
        assert (last, rows) == (0, [1.0] * 4)


def test_a_monitored_session_goes_on_from_what_the_chief_has_saved(ranks: list[Any]) -> None:
    (first, second), files = ranks[0]["monitored"]
    assert (first[0], second[0]) == (0, 3)
    assert {"model.ckpt-3.index", "model.ckpt-6.index"} <= set(files)
    for ours, theirs in zip((first, second), ranks[1]["monitored"][0], strict=True):
        assert ours[0] == theirs[0]
        for one, other in zip(ours[1], theirs[1], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("how", ["session", "monitored"])
def test_the_loss_of_a_rank_ends_the_run_and_the_session_can_be_closed(how: str) -> None:
    outcomes = run_ranks(killed, 2, how, check=False, env=DEFAULTS)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].ok, outcomes[0].details()
    ((number, rank, message),) = outcomes[0].value
    assert number in (2, 3) and rank == 1
    assert "rank 1 on " in message
