"""Steps and state of `updates.Sharded` beside `AllReduce`: `python -m benches.sharded_updates`.

A step sums gradients of `--size` bytes in square kernels of a million elements, and moves the
variables by Adam; the rules take turns. `state` are the bytes of Adam's moments that rank 0 holds.
With `--rate`, each rank has a simulated host; this needs root.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import gradring
from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings
from gradring import updates
from gradring.testing import run_ranks, simulated_hosts
from gradring.tools.bench.options import format_size, parse_sizes
from gradring.tools.cli.arguments import usage

RULES = (updates.AllReduce(), updates.Sharded())
SIDE = 1024
WARM_UPS = 2


@dataclass(frozen=True)
class Row:
    """One rule."""

    rule: str
    state_mib: float
    median_ms: float
    times: float


def rank_main(size: int, rounds: int) -> list[Row]:
    """Measures everything; only rank 0's rows count."""
    import tensorflow as tf

    # As many as a rank has cores here.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with gradring.init() as comm:
        found = {str(rule): _step(comm, rule, max(1, size // (4 * SIDE**2))) for rule in RULES}
        steps = {name: step for name, (step, _) in found.items()}
        seconds = in_turns(comm, steps, rounds, warm_ups=WARM_UPS)
        state = {name: _bytes(optimizer) for name, (_, optimizer) in found.items()}
        comm.barrier()
    first = statistics.median(seconds[str(RULES[0])].ravel())
    rows = []
    for name, measured in seconds.items():
        median = statistics.median(measured.ravel())
        mib = round(state[name] / 2**20, 1)
        rows.append(Row(name, mib, round(median * 1e3, 1), round(first / median, 2)))
    return rows


def _step(
    comm: gradring.Communicator, rule: updates.Rule, kernels: int
) -> tuple[Callable[[], Any], Any]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy(communicator=comm, update=rule)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([SIDE, SIDE])) for _ in range(kernels)]
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        # Each gradient depends on its variable, so none is a constant of the graph.
        strategy.run(
            lambda: optimizer.apply_gradients(
                [(0.5 - variable, variable) for variable in variables]
            )
        )
        return variables[0][0, 0]

    return lambda: float(step()), optimizer


def _bytes(optimizer: Any) -> int:
    values = [variable.value.numpy() for variable in optimizer.variables]
    return sum(value.nbytes for value in values)


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_rate(None)
    parser.add_argument("--size", type=usage(parse_sizes), default="64MiB", help="of the gradients")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_rounds(5)
    options = parser.parse(arguments)
    (size,) = options.size
    around = simulated_hosts(options.ranks, options.rate) if options.rate else nullcontext(())
    with around as hosts:
        rows: list[Row] = run_ranks(
            rank_main, options.ranks, size, options.rounds, hosts=hosts, timeout=TIMEOUT_S
        )[0]
    links = f", links of {options.rate}" if options.rate else " of one host"
    print(f"# {options.ranks} ranks{links}, {format_size(size)}")
    print_surroundings("tensorflow")
    print(f"{'rule':30} {'state MiB':>10} {'median ms':>10} {'times':>6}")
    for row in rows:
        print(f"{row.rule:30} {row.state_mib:10.1f} {row.median_ms:10.1f} {row.times:6.2f}")


if __name__ == "__main__":
    main()
