"""What TensorFlow users see when a collective fails."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_states import rank_0_waits
from tf_worker import join

import gradring
from gradring.testing import run_ranks
from waiting import wait_until


def mismatched() -> Any:
    """Rank 1 has another shape; the graph, the eager op and `strategy.run` must all say so."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    comm = join()
    x = tf.ones([98 if comm.rank == 0 else 102])
    reduce = tf.function(lambda t: all_reduce(t, "sum", "dense/kernel", comm))
    return caught(lambda: reduce(x)), caught(lambda: all_reduce(x, "sum", "later", comm))


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


def closed() -> Any:
    """One group is closed, and its traced function called again."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    comm = join()
    reduce = tf.function(lambda t: all_reduce(t, "sum", "x", comm))
    reduce(tf.ones([2]))
    comm.close()
    return caught(lambda: reduce(tf.ones([2])))


def killed() -> Any:
    """Rank 1 dies after two steps; the others return what they saw."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    comm = join()
    strategy = CustomCollectiveStrategy(communicator=comm)

    def replica_step(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    step = tf.function(lambda x: strategy.run(replica_step, args=(x,)))
    step(tf.ones([1000]))
    if comm.rank == 1:
        # The others take part, so they have left the first step.
        step(tf.ones([1000]))
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    in_graph = caught(lambda: [step(tf.ones([1000])) for _ in range(2)])
    eager = caught(lambda: strategy.run(replica_step, args=(tf.ones([3]),)))
    return {"graph": in_graph, "eager": eager, "seconds": time.monotonic() - since}


def fail_while_an_op_waits(how: str) -> Any:
    """Rank 1 fails once rank 0 has waited for it in an op; rank 0 returns what it saw."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    comm = join()
    strategy = CustomCollectiveStrategy(communicator=comm)

    @tf.function  # type: ignore[untyped-decorator]
    def replica_step(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def step() -> None:
        strategy.run(replica_step, args=(tf.ones([1000]),))

    step()
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 1:
        wait_until(rank_0_waits, "rank 0 waits in an op")
        strike(how, comm)
    seen = caught(step)
    if how == "SIGSTOP":
        os.kill(pids[1], signal.SIGKILL)
    return seen


def strike(how: str, comm: Any) -> None:
    if how == "exception":
        with comm:
            raise RuntimeError("the data set is gone")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.Signals[how])


def failing_between() -> Any:
    """Every other step fails on every rank after its reductions have started, and says so."""
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
        return raised, float(step(x, tf.constant(False))[0])


def compiled() -> Any:
    """The reduction inside code that XLA compiles."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    with join() as comm:
        reduce = tf.function(lambda t: all_reduce(t, "sum", "x", comm), jit_compile=True)
        return caught(lambda: reduce(tf.ones([2])))


def caught(call: Callable[[], Any]) -> Any:
    """Class names, message and facts of what `call` raises."""
    try:
        call()
    except Exception as error:
        names = [cls.__name__ for cls in type(error).__mro__]
        facts = ("rank", "host", "collective", "sequence", "elapsed_s")
        return names, str(error), {fact: getattr(error, fact, None) for fact in facts}
    return [], "nothing was raised", {}


def test_a_different_shape_names_the_rank_and_both_shapes() -> None:
    for in_graph, eager in run_ranks(mismatched, 2):
        names, message, _ = in_graph
        assert "AbortedError" in names
        assert "MismatchError" in message
        assert "dense/kernel" in message
        assert "[98]" in message and "[102]" in message
        assert "rank " in message
        names, _, facts = eager
        assert {"MismatchError", "AbortedError", "ValueError"} <= set(names)
        assert facts["rank"] == 1
        assert "dense/kernel" in facts["collective"]
        assert facts["sequence"] == 1


def test_a_late_rank_is_named_by_the_error_of_a_deadline(tmp_path: Path) -> None:
    (in_graph, eager), _ = run_ranks(late, 2, str(tmp_path / "done"))
    names, message, _ = in_graph
    assert "DeadlineExceededError" in names
    assert "CollectiveTimeoutError" in message and "rank 1 on " in message
    names, _, facts = eager
    assert {"CollectiveTimeoutError", "TimeoutError", "DeadlineExceededError"} <= set(names)
    assert facts["rank"] == 1


def test_a_function_traced_with_a_closed_communicator_says_so() -> None:
    for names, message, _ in run_ranks(closed, 2):
        assert "AbortedError" in names
        assert "traced with a communicator that is closed" in message


def test_a_killed_rank_is_named_on_every_survivor() -> None:
    outcomes = run_ranks(killed, 3, check=False)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.details()
        report = outcome.value
        names, message, _ = report["graph"]
        assert "AbortedError" in names
        assert "PeerLostError" in message and "rank 1 on " in message
        names, message, facts = report["eager"]
        assert {"PeerLostError", "ConnectionError", "AbortedError"} <= set(names), message
        assert facts["rank"] == 1 and f"rank 1 on {facts['host']}: " in message
        assert facts["collective"] in message
        assert f"(collective #{facts['sequence']})" in message
        assert report["seconds"] < 30


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("SIGKILL", "PeerLostError", "rank 1 on "),
        ("SIGSTOP", "PeerLostError", "no sign of life"),
        ("exception", "AbortedError", "RuntimeError: the data set is gone"),
        ("exit", "PeerLostError", "rank 1 on "),
    ],
)
def test_a_rank_that_fails_while_an_op_waits_for_it_is_named(
    how: str, kind: str, says: str
) -> None:
    waiting, _ = run_ranks(fail_while_an_op_waits, 2, how, check=False)
    assert waiting.ok, waiting.details()  # its process has ended by itself, too
    classes, message, facts = waiting.value
    assert {kind, "GradringError", "AbortedError", "OpError"} <= set(classes)
    assert "node GradringWait" in message and f"gradring {kind}: " in message and says in message
    assert facts["rank"] == 1 and facts["host"]
    assert facts["collective"].startswith("all_reduce(sum)")
    assert f"(collective #{facts['sequence']})" in message
    assert facts["elapsed_s"] > 0


def test_a_step_that_fails_by_itself_leaves_the_next_one_sound() -> None:
    for raised, total in run_ranks(failing_between, 2):
        assert raised == [[], ["InvalidArgumentError"]] * 3
        assert total == 10.0


def test_xla_refuses_the_reduction_with_the_words_that_the_documentation_explains() -> None:
    import gradring.tensorflow

    ((_, message, _),) = run_ranks(compiled, 1)
    words = "OpKernel for XLA_CPU_JIT"
    assert words in message
    assert words in " ".join((gradring.tensorflow.__doc__ or "").split())
