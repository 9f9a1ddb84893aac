"""What `check_gradients` costs a step: ``python -m benches.gradient_check``.

Two ranks reduce the gradients of an MLP inside a `tf.function`, which computes them first, so that
they are as much in cache as in training. Steps with and without the check take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import gradring
from benches.turns import in_turns
from gradring.bench.plan import refuse_debug_build
from gradring.testing import run_ranks

ROUNDS = 15
STEPS = 4
BATCH = 64


def _rank(width: int, layers: int) -> tuple[int, list[list[float]]]:
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    comm = gradring.init()
    weights = [
        tf.Variable(tf.random.normal([width, width], stddev=width**-0.5)) for _ in range(layers)
    ]
    x = tf.random.normal([BATCH, width])

    def step_with(check: str | None) -> Any:
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

    without, with_check = step_with(None), step_with("warn")
    without(), with_check()
    rows = in_turns(comm, [without, with_check], ROUNDS, STEPS)
    return layers * width * width, rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="what looking at gradients costs")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    refuse_debug_build()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    count, rows = run_ranks(_rank, 2, arguments.width, arguments.layers, timeout=600)[0]
    without, checked = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = [after / before for before, after in rows]
    print(
        f"{count / 1e6:.1f} million gradients: step {1e3 * without:.1f} ms, checked "
        f"{1e3 * checked:.1f} ms; ratio {statistics.median(ratios):.3f}, middle half "
        f"{statistics.quantiles(ratios)[0]:.3f} to {statistics.quantiles(ratios)[2]:.3f}"
    )


if __name__ == "__main__":
    main()
