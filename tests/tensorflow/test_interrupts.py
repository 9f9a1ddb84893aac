"""Ctrl-C and SIGTERM while TensorFlow waits for another rank."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradring.errors import AbortedError, PeerLostError
from gradring.testing import Outcome, run_ranks
from support.chosen import marked
from support.rank_states import rank_0_waits, state
from support.tf_worker import join
from support.waiting import wait_until

TIMEOUT_S = 120.0
PATIENCE_S = 30.0
"""Far below the timeout and far above what a busy machine needs."""
BLOCKED_S = 2.0
"""For so long, rank 0 stays in its op."""
CAUGHT_S = 5.0
"""After so long, the thread that listens for Ctrl-C has dealt with it on a busy machine, too."""


def all_reduce_in_a_function(comm: Any) -> Callable[[], Any]:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    step = tf.function(lambda x: all_reduce(x, "sum", "x", comm))
    return lambda: step(tf.ones([1000]))


def all_reduce_at_once(comm: Any) -> Callable[[], Any]:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    return lambda: all_reduce(tf.ones([1000]), "sum", "x", comm)


def after_another_handler(comm: Any) -> Callable[[], Any]:
    """The program has replaced the handler for a while, and with it what is in front of it."""
    step = all_reduce_in_a_function(comm)
    step()
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, usual)
    return step


def keras_fit(comm: Any) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with CustomCollectiveStrategy(communicator=comm).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    # Made of no tensors, so there is no order to agree on before the first op.
    data = tf.data.Dataset.range(8).map(lambda _: (tf.ones([4]), tf.ones([1]))).batch(8)
    return lambda: model.fit(data, verbose=0)


def interrupted(make: Callable[[Any], Callable[[], Any]], signum: int) -> Any:
    """Both train once; then rank 1 is late, and sends rank 0 a signal while that waits."""
    comm = join(timeout=TIMEOUT_S)
    step = make(comm)
    step()
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 0:
        try:
            step()
        except KeyboardInterrupt:
            return "interrupted"
        return "nothing was raised"
    own, _ = state()["members"][1]
    wait_until(rank_0_waits, "rank 0 waits in its op")
    os.kill(pids[0], signum)
    wait_until(lambda: state(own)["failed"] is not None, "this rank has heard of it")
    comm.all_reduce(np.ones(3))
    return "nothing was raised"


@pytest.mark.parametrize(
    "make",
    marked(
        (all_reduce_in_a_function, all_reduce_at_once, after_another_handler, keras_fit),
        quick=(after_another_handler, keras_fit),
    ),
)
def test_ctrl_c_ends_an_op_that_waits_and_names_its_rank_to_the_others(
    make: Callable[[Any], Callable[[], Any]],
) -> None:
    first, second = run_ranks(interrupted, 2, make, signal.SIGINT, check=False)
    assert first.ok, first.details()
    assert first.value == "interrupted"
    error = aborted(second, AbortedError)
    assert error.rank == 0
    assert "was interrupted (Ctrl-C or a signal handler)" in str(error)


def test_sigterm_ends_a_process_whose_op_waits() -> None:
    first, second = run_ranks(interrupted, 2, all_reduce_in_a_function, signal.SIGTERM, check=False)
    assert first.exit_code == -signal.SIGTERM
    assert aborted(second, PeerLostError).rank == 0


def aborted(outcome: Outcome, kind: Any) -> Any:
    assert isinstance(outcome.exception, kind), outcome.details()
    return outcome.exception


def handled_by_the_program() -> Any:
    """The program has its own handler, so an op that waits goes on waiting."""
    comm = join(timeout=TIMEOUT_S)
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    step = all_reduce_in_a_function(comm)
    step()
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 1:
        wait_until(rank_0_waits, "rank 0 waits in its op")
        os.kill(pids[0], signal.SIGINT)
        time.sleep(BLOCKED_S)
    return float(step()[0]), seen


def test_a_handler_of_the_program_is_left_alone() -> None:
    assert run_ranks(handled_by_the_program, 2) == [(2.0, [True]), (2.0, [])]


def caught_before() -> Any:
    """Ctrl-C that the program has dealt with ends no op that waits later."""
    comm = join(timeout=TIMEOUT_S)
    step = all_reduce_in_a_function(comm)
    step()
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(PATIENCE_S)
        # It does more than to wait again in the same millisecond.
        time.sleep(CAUGHT_S)
    else:
        wait_until(rank_0_waits, "rank 0 waits in its op")
    return float(step()[0])


@pytest.mark.slow
def test_ctrl_c_that_was_caught_before_ends_nothing_later() -> None:
    assert run_ranks(caught_before, 2) == [2.0, 2.0]
