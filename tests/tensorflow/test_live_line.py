"""The live line in `fit` and around steps of a strategy."""

import io
import re
import time
from typing import Any

import numpy as np
import pytest
from keras_models import BATCH, STEPS, compiled, dataset, needs_fit, strategy_of
from tf_worker import join

import gradring.errors
from gradring.testing import run_ranks

EPOCHS = 4


def fit(slow: int) -> Any:
    import keras

    from gradring.tensorflow.callbacks import LiveLine

    class Sleep(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.05 if comm.rank == slow else 0)

    output = io.StringIO()
    with join() as comm:
        model = compiled(strategy_of(comm), "mlp", "SGD")
        line = LiveLine(BATCH, every_steps=4, stream=output)
        data = dataset()
        model.fit(data, epochs=EPOCHS, verbose=0, validation_data=data, callbacks=[Sleep(), line])
        comm.barrier()
    return output.getvalue().splitlines()


@needs_fit
def test_fit_shows_lines_and_a_table() -> None:
    lines, nothing = run_ranks(fit, 2, 1, timeout=300)
    steps = EPOCHS * STEPS
    assert nothing == []
    assert len(lines) == (steps - 1) // 4 + 4
    for line in lines[:-4]:
        assert re.match(r"step \d+ \| [\d.]+ ms = compute .* samples/s \| ", line), lines
    # Validation is no step, so the slow rank's sleep stays most of what others wait for.
    assert any("slowest: rank 1" in line for line in lines[:-4]), lines
    assert lines[-3].split()[2] == lines[-2].split()[2] == str(steps - 1)
    assert lines[-1].startswith("Rank 1 on ")


def fit_without_strategy() -> None:
    import keras

    from gradring.tensorflow.callbacks import LiveLine

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with pytest.raises(gradring.errors.ConfigError, match="CustomCollectiveStrategy"):
        model.fit(np.ones((1, 2)), np.ones((1, 1)), verbose=0, callbacks=[LiveLine()])


@needs_fit
def test_a_model_of_another_strategy_is_refused() -> None:
    run_ranks(fit_without_strategy, 1, timeout=300)
