"""Workers that train for themselves, and have no sample of a batch: what they log, and validate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.log_lines import kept_lines
from support.served import served
from support.tf_worker import join

pytestmark = needs_fit

#: The last batch, of training and of validation, has one sample, which rank 0 has.
BATCH, COUNT, VALIDATED = 16, 33, 17


def fitted(strategy: Any, steps_per_execution: int = 1) -> Any:
    """What `fit` logs, the validated metric of each batch's part for each rank, and warnings."""
    import keras
    import tensorflow as tf

    def far(y: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.abs(y - outputs) ** 3)

    said = kept_lines()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        # TensorFlow's kernel of this convolution fails without samples.
        parts = [layers.SeparableConv2D(3, 3), layers.GlobalAveragePooling2D(), layers.Dense(1)]
        model = keras.Sequential([layers.Input((8, 8, 2)), *parts])
        model.compile(
            keras.optimizers.SGD(0.05),
            "mse",
            metrics=[far],
            steps_per_execution=steps_per_execution,
        )
    x = np.random.default_rng(0).normal(size=(COUNT, 8, 8, 2)).astype(np.float32)
    y = x[:, 0, 0, :1]
    validated = x[:VALIDATED], y[:VALIDATED]
    logs = model.fit(
        *(x, y, BATCH),
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=validated,
        callbacks=[keras.callbacks.EarlyStopping(patience=5)],
    ).history
    outputs = model.predict(validated[0], BATCH, verbose=0)
    half = BATCH // 2
    of_parts = [
        [float(far(y[part], outputs[part])) for part in those]
        for those in ((slice(0, half), slice(BATCH, VALIDATED)), (slice(half, BATCH),))
    ]
    return logs, of_parts, [line for line in said if "EarlyStopping" in line]


def job() -> dict[str, Any]:
    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        rule = updates.LocalSGD(every=2)
        local = fitted(CustomCollectiveStrategy(communicator=comm, update=rule))
        found = {"local": local}
        for steps in (1, 3):
            with served(comm, updates.ParameterServer()) as strategy:
                found[f"servers, {steps} steps at once"] = fitted(strategy, steps)
        return found


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(job, 2, timeout=280)


@pytest.mark.parametrize("rule", ["local", "servers, 1 steps at once", "servers, 3 steps at once"])
def test_a_batch_without_samples_counts_for_nothing_in_logs(ranks: Any, rule: str) -> None:
    for rank, found in enumerate(ranks):
        logs, of_parts, said = found[rule]
        assert len(said) == (rank == 0 and rule != "local")
        assert all(np.isfinite(values).all() for values in logs.values()), logs
        counted = of_parts[rank] if rule != "local" else [*of_parts[0], *of_parts[1]]
        np.testing.assert_allclose(logs["val_far"][-1], np.mean(counted), rtol=1e-4)
