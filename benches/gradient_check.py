"""The cost of `check_gradients` for each step: ``python -m benches.gradient_check``.

Two ranks reduce the gradients of an MLP inside a `tf.function`, which computes them first, so that
they are as much in cache as in training. Steps with and without the check take turns.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import gradring
from benches.harness import Parser, in_turns
from gradring.gradients.checks import CheckGradients
from gradring.testing import run_ranks

ROUNDS = 15
STEPS = 4
BATCH = 64


def _rank(width: int, layers: int) -> tuple[int, list[Any]]:
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    comm = gradring.init()
    weights = [
        tf.Variable(tf.random.normal([width, width], stddev=width**-0.5)) for _ in range(layers)
    ]
    x = tf.random.normal([BATCH, width])

    def step_with(check: CheckGradients | None) -> Any:
        reduce_gradients = GradientReducer(communicator=comm, check_gradients=check)

        @tf.function  # type: ignore[untyped-decorator]
        def step() -> None:
            with tf.GradientTape() as tape:
                y = x
                for weight in weights:
                    y = tf.tanh(y @ weight)
                loss = tf.reduce_mean(y * y)
            for weight, gradient in zip(
                weights, reduce_gradients(tape.gradient(loss, weights)), strict=True
            ):
                weight.assign_sub(1e-6 * gradient)

        return step

    ways = {"without": step_with(None), "checked": step_with("warn")}
    found = in_turns(comm, ways, ROUNDS, STEPS, warm_ups=1)
    return layers * width * width, [steps_s.mean(axis=1) for steps_s in found.values()]


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    count, (without, checked) = run_ranks(_rank, 2, arguments.width, arguments.layers, timeout=600)[
        0
    ]
    low, middle, high = np.quantile(checked / without, (0.25, 0.5, 0.75))
    print(
        f"{count / 1e6:.1f} million gradients: step {1e3 * np.median(without):.1f} ms, checked "
        f"{1e3 * np.median(checked):.1f} ms; ratio {middle:.3f}, middle half "
        f"{low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
