"""Gradients that are not finite: the rank and the variable are named, and nobody hangs."""

import logging
import re
from typing import Any, get_args

import numpy as np
import pytest

from gradring import errors
from gradring.gradients.checks import CheckGradients
from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.tf_worker import join
from support.waiting import wait_until

STEPS = 4
#: The step, from 1, in which rank 1 has a gradient that is not finite.
BAD = 3


class Heard(logging.Handler):
    """What the log of this rank says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("gradring").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def wait(self) -> None:
        """Until there is a line about rank 1, which may come from there and on another thread."""
        wait_until(
            lambda: any(line.startswith("rank 1 ") for line in self.lines), "a line about rank 1"
        )


def reduced(check: CheckGradients | None, sparse: bool = False, embeddings: Any = "rows") -> Any:
    """A `tf.function` of one's own; what was reduced, or the error, and the log."""
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    comm = join()
    heard = Heard()  # Nothing about how the ranks are connected.
    reduce_gradients = GradientReducer(
        communicator=comm, check_gradients=check, embeddings=embeddings
    )

    def gradient(value: Any) -> Any:
        if not sparse:
            return tf.fill([5], value)
        return tf.IndexedSlices(tf.fill([2, 3], value), tf.constant([1, 4]), [1000, 3])

    @tf.function  # type: ignore[untyped-decorator]
    def step(value: Any) -> Any:
        both = reduce_gradients([tf.ones([7]), gradient(value)], ["dense/kernel", "table"])
        return tf.convert_to_tensor(both[0]), both[1].values if sparse else both[1]

    error, results = None, []
    try:
        for number in range(1, STEPS + 1):
            bad = number >= BAD and comm.rank == 1
            first, second = step(tf.constant(np.inf if bad else 1.0))
            results.append((first.numpy(), second.numpy()))
    except tf.errors.AbortedError as failure:
        error = str(failure)
    if check == "warn" and comm.rank < 2:
        heard.wait()
    if error is None:
        comm.barrier()
    comm.close()
    return results, error, heard.lines, comm.host


def test_a_warning_names_rank_and_variable_there_and_on_the_chief() -> None:
    everybody = run_ranks(reduced, 3, "warn", timeout=300)
    for results, error, _, _ in everybody:
        assert error is None
        assert len(results) == STEPS
        assert np.all(results[0][1] == 1) and np.all(np.isinf(results[BAD - 1][1]))
    expected = f"gradient of 'table' has 5 non-finite values of 5 at step {BAD}"
    for _, _, lines, host in everybody[:2]:
        # The next step has as many, and is no second line.
        assert lines == [f"rank 1 on {host}: {expected}"]
    assert everybody[2][2] == []


@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_raising_ends_every_rank_with_the_name(sparse: bool) -> None:
    for results, error, _, host in run_ranks(reduced, 2, "raise", sparse, timeout=300):
        assert len(results) == BAD - 1
        assert f"rank 1 on {host}: aborted the communicator: gradient of 'table' has" in error
        assert f"non-finite values of {6 if sparse else 5} at step {BAD}" in error


def raised_at_owners() -> Any:
    """What is said when all rows go to owners, also those of which this rank is the owner."""
    from gradring.tensorflow.graph import sparse

    sparse.MESSAGE_BYTES, sparse.OWNER_BYTES = -(1 << 40), 0
    sparse._message_bytes = lambda communicator: -(1 << 40)
    return reduced("raise", True, "sum")


@pytest.mark.slow
def test_rows_are_looked_at_before_owners_add_them_up() -> None:
    everybody = run_ranks(raised_at_owners, 3, timeout=300)
    for results, error, _, host in everybody:
        assert len(results) == BAD - 1
        expected = (
            f"rank 1 on {host}: aborted the communicator: gradient of 'table' has 6 non-finite"
        )
        assert expected in error
    # The others may hear of it before they have come so far.
    assert "to owners" in everybody[1][1]


@pytest.mark.slow
def test_without_the_option_nobody_looks() -> None:
    for results, error, lines, _ in run_ranks(reduced, 2, None, timeout=300):
        assert (len(results), error, lines) == (STEPS, None, [])


def trained(check: CheckGradients, scaled: bool) -> Any:
    """`fit`, in which rank 1's part of one batch overflows."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    comm = join()
    heard = Heard()  # Nothing about how the ranks are connected.
    strategy = CustomCollectiveStrategy(communicator=comm, check_gradients=check)
    x = np.ones((STEPS * 8, 3), np.float32)
    # The last half of a batch is rank 1's.
    x[BAD * 8 - 1] = 3e38
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, name="last")])
        optimizer = keras.optimizers.SGD(1e-3)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse")
    try:
        model.fit(data.with_options(options), verbose=0, shuffle=False)
    except tf.errors.AbortedError as failure:
        # The text, because the group is gone and with it the wish to close in good order.
        return str(failure), heard.lines, comm.host
    if not scaled:
        heard.wait()
    comm.barrier()
    finite = bool(np.all(np.isfinite(model.get_weights()[0])))
    return finite, heard.lines, comm.host


@needs_fit
@pytest.mark.slow
def test_fit_warns_and_goes_on() -> None:
    for finite, lines, host in run_ranks(trained, 2, "warn", False, timeout=300):
        assert not finite
        pattern = rf"rank 1 on {re.escape(host)}: gradient of '\S*last/\w+' has .* at step {BAD}"
        # From the next step on all ranks have the same NaN, as the step in the line tells.
        first = min(lines, key=lambda line: int(line.rpartition(" ")[2]))
        assert re.fullmatch(pattern, first), lines
        assert len(lines) <= 2


@needs_fit
def test_fit_raises_on_every_rank() -> None:
    for message, _, host in run_ranks(trained, 2, "raise", False, timeout=300):
        assert f"rank 1 on {host}: aborted the communicator: gradient of '" in message


@needs_fit
@pytest.mark.slow
def test_what_loss_scaling_skips_is_nobodys_business() -> None:
    for check in get_args(CheckGradients):
        for finite, lines, _ in run_ranks(trained, 2, check, True, timeout=300):
            assert (finite, lines) == (True, [])


def refused() -> None:
    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer

    for make in (CustomCollectiveStrategy, GradientReducer):
        with pytest.raises(errors.ConfigError, match="check_gradients='always' is unknown"):
            make(check_gradients="always")  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError, match="bucket_bytes=0 is not a positive number"):
            make(bucket_bytes=0)


def test_an_unknown_wish_is_refused() -> None:
    run_ranks(refused, 1, timeout=300)
