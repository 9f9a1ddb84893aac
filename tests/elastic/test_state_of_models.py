"""Variables of models and optimizers that a `gradring.tensorflow.elastic.State` keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradring.errors import ConfigError
from gradring.testing import run_ranks


def refusal(act: Any) -> str:
    """What a refused act is told."""
    try:
        act()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def keep_models() -> dict[str, Any]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, elastic

    class Own(keras.Model):  # type: ignore[misc]
        """Has a layer that only training needs."""

        def __init__(self) -> None:
            super().__init__()
            self.main, self.other = keras.layers.Dense(1), keras.layers.BatchNormalization()

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.main(self.other(inputs, training=True) if training else inputs)

    class Late(tf.Module):  # type: ignore[misc]
        """Makes its variable when it is called."""

        weight: Any = None

        def __call__(self) -> None:
            self.weight = tf.Variable(tf.ones([3]))

    inputs = np.ones((2, 8), np.float32)
    found: dict[str, Any] = {}
    strategy = CustomCollectiveStrategy()
    with strategy.scope():
        model, module = Own(), Late()
        model.build((None, 8))
        found["claims"] = model.built, len(model.weights)
        found["unbuilt"] = refusal(lambda: elastic.State(model=model))
        model(inputs)
        of_model = elastic.State(model=model, step=0)
        of_module = elastic.State(model=module, step=0)
        of_model.commit()
        of_module.commit()
        model(inputs, training=True)
        module()
        found["late layer"] = refusal(of_model.commit)
        found["late variable"] = refusal(of_module.commit)
        complete = elastic.State(model=model, step=0)
        model.compile("adam", "mse", metrics=["mae"])
    complete.commit()
    model.fit(inputs, inputs[:, :1], verbose=0)  # makes metrics, and another optimizer
    complete.commit()

    with strategy.scope():
        weight, counter = tf.Variable([1.0, 2.0]), tf.Variable(0, trainable=False)
    optimizer = keras.optimizers.Adam()
    alone = elastic.State(variables=[weight, counter], optimizer=optimizer, step=0)
    gradient = tf.constant([1.0, -1.0])
    strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))
    found["trained"] = weight.numpy().tolist()
    alone.restore()
    moments = [np.asarray(part).tolist() for part in optimizer.variables if part.shape == (2,)]
    found["restored"] = weight.numpy().tolist(), moments
    return found


def test_a_state_keeps_all_that_is_trained_or_says_what_it_would_lose() -> None:
    (found,) = run_ranks(keep_models, 1, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
    assert found["claims"] == (True, 0)
    assert "has no variables yet; build it in the strategy's scope" in found["unbuilt"]
    for late, name in (
        ("late layer", "batch_normalization/gamma and 3 more"),
        ("late variable", ""),
    ):
        assert "has variables that it did not have when its State was made" in found[late]
        assert name in found[late]
    assert found["trained"] != [1.0, 2.0]
    # The optimizer's own variables are built for what is trained, and kept.
    assert found["restored"] == ([1.0, 2.0], [[0.0, 0.0], [0.0, 0.0]])
