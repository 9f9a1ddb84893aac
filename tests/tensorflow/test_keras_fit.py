"""`model.fit` of Keras 3 under the strategy."""

from typing import Any

import numpy as np
import pytest
from tf_worker import join

from gradring.testing import run_ranks


def fit() -> Any:
    import keras

    import tensorflow as tf
    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        keras.utils.set_random_seed(comm.rank + 1)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((8,)),
                    keras.layers.Dense(16, activation="relu"),
                    keras.layers.Dense(3),
                ]
            )
            model.compile(
                "adam",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        draw = np.random.default_rng(0)
        x = draw.normal(size=(256, 8)).astype(np.float32)
        y = draw.integers(0, 3, 256)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
        history = model.fit(dataset, epochs=3, verbose=0, validation_data=dataset).history
        predicted = model.predict(dataset, verbose=0)
        return history, [np.asarray(weight) for weight in model.get_weights()], predicted.shape


def test_fit_trains_two_workers_as_one_process() -> None:
    first, second = run_ranks(fit, 2)
    (alone,) = run_ranks(fit, 1)
    for mine, theirs, expected in zip(first[1], second[1], alone[1], strict=True):
        assert mine.tobytes() == theirs.tobytes()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-5)
    assert first[0] == second[0]
    for name, values in alone[0].items():
        assert first[0][name] == pytest.approx(values, abs=1e-5), name
    assert first[2] == alone[2] == (256, 3)
