"""``python with_strategy.py PROGRAM ...``: the program, with the strategy set for all it does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy


def keep_through_resets(strategy: tf.distribute.Strategy) -> None:
    """Sets the strategy again with a new default graph, such as after `keras.utils.clear_session`.

    TensorFlow keeps it in the default graph, so that Keras Tuner loses it before the first trial.
    """
    reset = tf.compat.v1.reset_default_graph

    def reset_and_set() -> None:
        reset()
        tf.distribute.experimental_set_strategy(strategy)

    tf.compat.v1.reset_default_graph = reset_and_set


if __name__ == "__main__":
    strategy = CustomCollectiveStrategy()
    tf.distribute.experimental_set_strategy(strategy)
    keep_through_resets(strategy)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    if tf.distribute.get_strategy() is not strategy:
        raise SystemExit("the program has lost the strategy, and trained on each rank by itself")
