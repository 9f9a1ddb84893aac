"""Failures of a collective, as TensorFlow users see them."""

import contextlib
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.testing import run_ranks
from support.keras_models import CAN_FIT
from support.rank_states import rank_0_waits
from support.tf_worker import join
from support.waiting import SOON_LOST, wait_until

NEEDS_TF_KERAS = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="needs tf_keras"
)
SLOW = pytest.mark.slow
#: They begin with a comparison of their arguments, in which TensorFlow has no part.
LOOPS = ("fit", "evaluate", "predict")
#: How TensorFlow begins to say where in the program an op was made.
TRACE = "Graph execution error"


def mismatched() -> Any:
    """Rank 1 has another shape; the graph and the eager op must both say so."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    comm = join()
    x = tf.ones([98 if comm.rank == 0 else 102])

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        return all_reduce(x, "sum", "dense/kernel", comm)

    return caught(lambda: step(x)), caught(lambda: all_reduce(x, "sum", "later", comm))


def late(done: str) -> Any:
    """Rank 1 never reduces; it is alive until rank 0's time is over."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    join().close()  # Once it is there, both have imported TensorFlow, which takes its time.
    with gradring.init(stall_timeout=5.0) as comm:
        if comm.rank == 1:
            wait_until(Path(done).exists, "rank 0's time is over")
            return None
        reduce = tf.function(lambda t: all_reduce(t, "sum", "x", comm))
        seen = caught(lambda: reduce(tf.ones([2]))), caught(lambda: all_reduce(tf.ones([2])))
        Path(done).touch()
        return seen


def ways_to_train(strategy: Any) -> dict[str, Callable[..., Any]]:
    """What reduces over the ranks, through all of TensorFlow's ways to raise an error."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    comm, x = strategy.communicator, tf.ones([1000])

    @tf.function  # type: ignore[untyped-decorator]
    def replica_step(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def reduced(x: Any) -> Any:
        return all_reduce(x, "sum", "x", comm)

    def in_python(x: Any) -> Any:
        return comm.all_reduce(x.numpy())

    def generated() -> Any:
        yield comm.all_reduce(np.ones(3, np.float32))

    ways: dict[str, Callable[..., Any]] = {
        "run": lambda: strategy.run(replica_step, args=(x,)),
        "function": lambda: tf.function(reduced)(x),
        "op": lambda: reduced(x),
        "py_function": lambda: tf.function(lambda x: tf.py_function(in_python, [x], tf.float32))(x),
        "generator": lambda: next(
            iter(
                tf.data.Dataset.from_generator(
                    generated, output_signature=tf.TensorSpec([3], tf.float32)
                )
            )
        ),
        "trace": lambda: tf.function(lambda: comm.all_reduce(np.ones(3)))(),
    }
    if CAN_FIT or tf.keras.__name__.startswith("tf_keras"):
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        # Made of no tensors, so there is no order to agree on before the first op.
        data = tf.data.Dataset.range(8).map(lambda _: (tf.ones([4]), tf.ones([1]))).batch(8)
        for loop in LOOPS:
            ways[loop] = functools.partial(getattr(model, loop), data, verbose=0)
        ways["layer"] = lambda: model(tf.keras.layers.Lambda(reduced)(tf.ones([8, 4])))
    return ways


def fail_while_an_op_waits(how: str, first: str) -> Any:
    """Rank 1 fails once rank 0 has waited for it in an op; what rank 0 then sees in all ways."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    comm = join()
    ways = ways_to_train(CustomCollectiveStrategy(communicator=comm))
    first = first if first in ways else "run"
    ways[first]()
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 1:

        def fail(*_: Any, **__: Any) -> None:
            wait_until(rank_0_waits, "rank 0 waits in an op")
            strike(how, comm)

        if first in LOOPS:
            at_batch = tf.keras.callbacks.Callback()
            at_batch.on_train_batch_begin = at_batch.on_test_batch_begin = fail
            ways[first](callbacks=[at_batch])
        else:
            fail()
        return None
    seen = {first: caught(ways.pop(first))}
    if how == "SIGSTOP":
        os.kill(pids[1], signal.SIGKILL)
    seen |= {name: caught(way) for name, way in ways.items()}
    return tf.keras.__name__, seen


def strike(how: str, comm: Any) -> None:
    if how == "exception":
        with comm:
            raise RuntimeError("the data set is gone")
    if how == "exit":
        sys.exit(3)
    if how == "abort":
        comm.abort("the loss is a NaN")
    elif how == "mismatch":
        with contextlib.suppress(gradring.errors.MismatchError):
            comm.all_reduce(np.ones(3), name="something else")
    else:
        os.kill(os.getpid(), signal.Signals[how])


def failing_between() -> Any:
    """Every other step fails on every rank after its reductions have started, and says so.

    In the end the group is closed, and the traced step called again.
    """
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    with join() as comm:

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, bad: Any) -> Any:
            total = all_reduce([x * 2.0, x * 3.0], "sum", "step", comm)
            tf.debugging.assert_equal(bad, False)
            return total[0] + total[1]

        x = tf.ones([1 << 18])

        def attempt(bad: bool) -> Any:
            def alike() -> None:
                with comm.step(abort_on_exception=False):
                    step(x, tf.constant(bad))

            return caught(alike)[0][:1]

        raised = [attempt(bad=i % 2 == 1) for i in range(6)]
        total = float(step(x, tf.constant(False))[0])
    return raised, total, caught(lambda: step(x, tf.constant(False)))


def compiled() -> Any:
    """The reduction inside code that XLA compiles, and in `fit`."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, all_reduce

    with join() as comm:
        plain = tf.function(lambda t: all_reduce(t, "sum", "x", comm))
        plain(tf.ones([2]))  # traced before XLA looks at it
        outside = tf.function(lambda t: plain(t), jit_compile=True)
        inside = tf.function(lambda t: all_reduce(t, "sum", "x", comm), jit_compile=True)
        raised = [caught(functools.partial(f, tf.ones([2]))) for f in (inside, outside)]
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=True)
        x = np.ones((4, 2), np.float32)
        return [*raised, *([caught(lambda: model.fit(x, x, verbose=0))] if CAN_FIT else [])]


def caught(call: Callable[[], Any]) -> Any:
    """Class names, message and facts of what `call` raises."""
    from gradring.tensorflow import failure_of

    try:
        call()
    except Exception as error:
        if isinstance(error, gradring.errors.GradringError):
            assert failure_of(error) is error
        return described(error)
    return [], "nothing was raised", {}


def described(error: BaseException) -> Any:
    names = [cls.__name__ for cls in type(error).__mro__]
    facts = ("problem", "advice", "rank", "host", "collective", "sequence", "elapsed_s")
    return names, str(error), {fact: getattr(error, fact, None) for fact in facts}


def test_a_different_shape_names_the_rank_and_both_shapes() -> None:
    for in_graph, eager in run_ranks(mismatched, 2):
        assert "[98]" in in_graph[1] and "[102]" in in_graph[1]
        # The call may be wrong, so TensorFlow says where it is.
        assert "in step" in in_graph[1].partition(TRACE)[2], in_graph[1]
        for names, message, facts in (in_graph, eager):
            assert {"MismatchError", "AbortedError", "ValueError"} <= set(names)
            assert "MismatchError" in message and "rank 1 " in message
            # TensorFlow adds words to the message, and none to its parts.
            assert f"{facts['problem']}; {facts['advice']}" in message
            assert facts["problem"].startswith(facts["collective"])
            assert facts["advice"].startswith("make every rank call the same collectives")
            assert facts["rank"] == 1
            assert "dense/kernel" in facts["collective"]
            assert facts["sequence"] == 1


def test_a_late_rank_is_named_by_the_error_of_a_deadline(tmp_path: Path) -> None:
    (in_graph, eager), _ = run_ranks(late, 2, str(tmp_path / "done"))
    for names, message, facts in (in_graph, eager):
        assert {"CollectiveTimeoutError", "TimeoutError", "DeadlineExceededError"} <= set(names)
        assert "CollectiveTimeoutError" in message and "rank 1 on " in message
        assert facts["rank"] == 1


def rewrapped() -> Any:
    """What becomes of an error that others copy, pickle, wrap or make again with more words."""
    import copy
    import pickle

    import keras
    import tensorflow as tf

    from gradring.tensorflow import all_reduce, failure_of

    comm = join()
    reduce = tf.function(lambda t: all_reduce(t, "sum", "x", comm))
    reduce(tf.ones([2]))
    comm.abort("enough")
    with pytest.raises(tf.errors.AbortedError) as raised:
        reduce(tf.ones([2]))
    error = raised.value
    again = type(error)(error.node_def, error.op, f"In a layer: {error.message}", {})
    with pytest.raises(gradring.errors.AbortedError) as in_layer:
        keras.layers.Lambda(lambda x: comm.all_reduce(np.ones(2)))(np.ones([1, 2]))
    copies = [copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error)), again]

    def chained(step: Callable[[], Any]) -> Any:
        try:
            step()
        except Exception as outer:
            return failure_of(outer)

    def from_it() -> None:
        try:
            reduce(tf.ones([2]))
        except tf.errors.OpError as inner:
            raise KeyError("no such batch") from inner

    def instead_of_it() -> None:
        try:
            comm.barrier()
        except gradring.errors.GradringError:
            raise KeyError("no such batch") from None

    def in_words() -> None:
        raise RuntimeError(f"a worker says: {error}")

    wrapped = [chained(step) for step in (from_it, instead_of_it, in_words)]
    wrapped += [failure_of(in_layer.value)]
    others = [
        ValueError("gradring AbortedError: never seen"),
        tf.errors.AbortedError(None, None, "x"),
    ]
    foreign = [failure_of(other) for other in others]
    return (
        described(error),
        [described(e) for e in copies],
        [described(e) for e in wrapped],
        foreign,
    )


def test_an_error_that_is_copied_or_wrapped_is_found_again() -> None:
    ((original, copies, wrapped, foreign),) = run_ranks(rewrapped, 1)
    classes, message, facts = original
    assert {"AbortedError", "GradringError", "RuntimeError", "OpError"} <= set(classes)
    assert facts["rank"] == 0 and facts["collective"] and "enough" in message
    for copied in copies[:-1]:
        assert copied == original
    assert copies[-1] == (classes, f"In a layer: {message}", facts)
    for found in wrapped:
        assert "GradringError" in found[0] and found[2]["rank"] == 0, found
    assert foreign == [None, None]


@pytest.mark.parametrize(
    ("how", "first", "kind", "says"),
    [
        ("SIGKILL", "fit", "PeerLostError", "rank 1 on "),
        pytest.param("SIGSTOP", "run", "PeerLostError", "no sign of life", marks=SLOW),
        ("exception", "function", "AbortedError", "RuntimeError: the data set is gone"),
        pytest.param("exit", "evaluate", "PeerLostError", "rank 1 on ", marks=SLOW),
        pytest.param("abort", "fit", "AbortedError", "the loss is a NaN", marks=SLOW),
        pytest.param("mismatch", "fit", "MismatchError", "something else", marks=SLOW),
    ],
)
@pytest.mark.parametrize("legacy", [False, pytest.param(True, marks=(NEEDS_TF_KERAS, SLOW))])
def test_a_rank_that_fails_while_an_op_waits_for_it_is_named(
    how: str, first: str, kind: str, says: str, legacy: bool
) -> None:
    env = {**SOON_LOST, **({"TF_USE_LEGACY_KERAS": "1"} if legacy else {})}
    waiting, _ = run_ranks(fail_while_an_op_waits, 2, how, first, env=env, check=False)
    assert waiting.ok, waiting.details()  # its process has ended by itself, too
    keras, seen = waiting.value
    assert keras.startswith("tf_keras") == legacy
    for place, (way, (classes, message, facts)) in enumerate(seen.items()):
        assert {kind, "GradringError"} <= set(classes), (way, message)
        # What begins after the failure does not come to an op.
        is_of_tensorflow = place == 0 or way not in ("trace", *LOOPS)
        assert ("OpError" in classes) == is_of_tensorflow, (way, classes)
        assert says in message and facts["rank"] == 1 and facts["host"], (way, message)
        assert f"(collective #{facts['sequence']})" in message, way
        # Where this rank's op was made explains nothing of another rank's end.
        assert kind == "MismatchError" or TRACE not in message, (way, message)
    classes, message, facts = next(iter(seen.values()))
    assert {"AbortedError", "OpError"} <= set(classes)
    # The sentence comes before what TensorFlow says.
    assert "GradringWait" in message and f"gradring {kind}: " in message.splitlines()[0]
    assert facts["collective"].startswith("all_reduce(sum)")
    assert facts["elapsed_s"] > 0


@pytest.fixture(scope="module")
def stepped() -> Any:
    return run_ranks(failing_between, 2)


def test_a_step_that_fails_by_itself_leaves_the_next_one_sound(stepped: Any) -> None:
    for raised, total, _ in stepped:
        assert raised == [[], ["InvalidArgumentError"]] * 3
        assert total == 10.0


def test_a_function_traced_with_a_closed_communicator_says_so(stepped: Any) -> None:
    for _, _, (names, message, _) in stepped:
        assert {"AbortedError", "GradringError"} <= set(names)
        assert "traced with a communicator that is closed" in message
        assert "in step" in message.partition(TRACE)[2], message


def test_a_reduction_that_xla_would_compile_is_a_setting_that_cannot_be_used() -> None:
    for raised in run_ranks(compiled, 2):
        for kinds, message, _ in raised:
            assert {"ConfigError", "InvalidArgumentError"} <= set(kinds)
            assert message.startswith("a collective is inside code compiled with jit_compile=True")
            assert "compile(jit_compile=False)" in message.partition("\n")[0]
            assert message.count("XLA has no kernel for it") == 1
