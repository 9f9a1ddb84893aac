"""The cost of a reduction inside a graph: `python -m benches.graph_reductions`.

Two ranks, in turns: a call with an array (*array*), and, in the loop of one `tf.function`, a
reduction of what an operation has just computed, less the same loop without it (*in a graph*). The
call of the function itself, which takes TensorFlow 0.1 ms and more, is divided over the loop.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from benches.harness import Parser, in_turns, print_surroundings, repeated, slowest
from gradring.config.values import Transport
from gradring.testing import run_ranks

#: Bytes, and how many reductions a loop has.
SIZES = {4: 200, 4 << 10: 200, 64 << 10: 100, 1 << 20: 20, 16 << 20: 6, 100 << 20: 3}


def rank_main(
    sizes: tuple[int, ...], rounds: int, transport: Transport
) -> dict[int, dict[str, Any]]:
    """Seconds of a reduction by size and way, `[rounds]`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    import gradring
    from gradring.tensorflow import all_reduce

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    found: dict[int, dict[str, Any]] = {}
    with gradring.init(transport=transport) as comm:

        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def loop(x: Any, repetitions: Any, reduces: bool) -> Any:
            for _ in tf.range(repetitions):
                x = x * 0.5 + 1.0
                if reduces:
                    x = all_reduce(x, "mean", communicator=comm)
            return x

        for size in sizes:
            repetitions = SIZES[size]
            array, x = np.ones(size // 4, np.float32), tf.ones([size // 4])

            def reduced(x: Any = x, repetitions: int = repetitions) -> None:
                assert loop(x, tf.constant(repetitions), True).numpy()[0] <= 2

            def empty(x: Any = x, repetitions: int = repetitions) -> None:
                loop(x, tf.constant(repetitions), False).numpy()

            called = repeated(partial(comm.all_reduce, array, "mean"), repetitions)
            ways = {"array": called, "reduced": reduced, "empty": empty}
            times = in_turns(comm, ways, rounds, warm_ups=1)
            seconds = {way: took[:, 0] / repetitions for way, took in times.items()}
            found[size] = {
                "array": seconds["array"],
                "in a graph": seconds["reduced"] - seconds["empty"],
            }
    return found


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = Parser(__doc__)
    parser.add_rounds(15)
    parser.add_sizes(SIZES)
    parser.add_argument("--transport", default="tcp,shm")
    options = parser.parse()
    print_surroundings("tensorflow")
    print("# microseconds, p50 / p90")
    for transport in options.transport.split(","):
        ranks = run_ranks(rank_main, 2, options.sizes, options.rounds, transport)
        for size in options.sizes:
            print(f"{transport:4} {size:10} B", end="")
            for way, took in slowest([rank[size] for rank in ranks]).items():
                p50, p90 = np.quantile(took * 1e6, [0.5, 0.9])
                print(f"   {way} {p50:9.1f} / {p90:9.1f}", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
