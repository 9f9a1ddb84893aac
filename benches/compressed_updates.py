"""Steps by compressed gradients over slow links: `python -m benches.compressed_updates`, as root.

Simulated hosts with a rank on each are joined by links of `--rate` in each direction. A step sums
gradients of `--size` bytes, random ones in kernels of a million elements that are as wide as they
are high, and moves the variables by SGD; the rules take turns. `bytes` are what a rank sends for
each element, and `times` how often the rule does what the first does once: the effective rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradring
from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings
from gradring import updates
from gradring.testing import run_ranks, simulated_hosts
from gradring.tools.bench.options import format_size, parse_sizes
from gradring.tools.cli.arguments import usage

RULES = (
    updates.AllReduce(),
    updates.AllReduce(updates.Bits16()),
    updates.AllReduce(updates.Int8()),
    updates.AllReduce(updates.TopK(0.01)),
    updates.AllReduce(updates.PowerSGD(4)),
)
SIDE = 1024
WARM_UPS = 2


@dataclass(frozen=True)
class Row:
    """One rule."""

    rule: str
    bytes_per_element: float
    median_ms: float
    times: float


def rank_main(size: int, rounds: int) -> list[Row]:
    """Measures everything; only rank 0's rows count."""
    import tensorflow as tf

    # As many as a rank has cores here.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with gradring.init() as comm:
        steps = {str(rule): _step(comm, rule, max(1, size // (4 * SIDE**2))) for rule in RULES}
        sent = {}
        for name, step in steps.items():
            step()
            before = comm.stats()["bytes_sent"]
            step()
            sent[name] = comm.stats()["bytes_sent"] - before
        seconds = in_turns(comm, steps, rounds, warm_ups=WARM_UPS)
        comm.barrier()
    first = statistics.median(seconds[str(RULES[0])].ravel())
    rows = []
    for name, measured in seconds.items():
        median = statistics.median(measured.ravel())
        per_element = sent[name] / max(SIDE**2, size // 4)
        row = Row(name, round(per_element, 3), round(median * 1e3, 1), round(first / median, 2))
        rows.append(row)
    return rows


def _step(comm: gradring.Communicator, rule: updates.Rule, kernels: int) -> Callable[[], Any]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy(communicator=comm, update=rule)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([SIDE, SIDE])) for _ in range(kernels)]
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(variables)
    gradients = [
        tf.random.stateless_normal([SIDE, SIDE], [comm.rank, number]) for number in range(kernels)
    ]

    def replica_step() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        strategy.run(replica_step)
        return variables[0][0, 0]

    return lambda: float(step())


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_rate("1gbit")
    parser.add_argument("--size", type=usage(parse_sizes), default="64MiB", help="of the gradients")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_rounds(5)
    options = parser.parse(arguments)
    (size,) = options.size
    with simulated_hosts(options.hosts, options.rate) as hosts:
        rows: list[Row] = run_ranks(
            rank_main, len(hosts), size, options.rounds, hosts=hosts, timeout=TIMEOUT_S
        )[0]
    print(f"# {options.hosts} simulated hosts, links of {options.rate}, {format_size(size)}")
    print_surroundings("tensorflow")
    print(f"{'rule':60} {'bytes':>6} {'median ms':>10} {'times':>6}")
    for row in rows:
        print(f"{row.rule:60} {row.bytes_per_element:6.3f} {row.median_ms:10.1f} {row.times:6.2f}")


if __name__ == "__main__":
    main()
