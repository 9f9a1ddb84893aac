"""Ways to reduce gradients of embeddings: `python -m benches.sparse_gradients`.

Ranks have rows of a table, some of which all of them share, and the others of which no two do. The
ways take turns: *rows*, gathered from all by all; *owners*, which add rows up and send the sums;
the whole *table*; and what is *chosen*. `sent` is what a rank sends, in MB of 1e6 bytes. With
`--rate`, as root, ranks are on simulated hosts that are joined by links of this rate.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradring
from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings, write
from gradring.testing import run_ranks
from gradring.tools.bench.network import network

#: Rows and columns of the table, of float32: 26 MB.
ROWS, COLUMNS = 100_000, 64
#: Of the table's rows, how many a rank has; and of these, how many all ranks share.
DENSITIES, SHARED = (0.01, 0.1, 0.4), (0.0, 0.5, 1.0)
WAYS = ("rows", "owners", "table", "chosen")
WARM_UPS = 2
#: Between the sums of two ways, which may add in different orders.
CLOSE = 1e-5


@dataclass(frozen=True)
class Row:
    """One way to reduce what one rank in so many has."""

    density: float
    shared: float
    way: str
    sent_mb: float
    median_ms: float


def rank_main(rounds: int) -> list[Row]:
    """Measures everything; only rank 0's rows count."""
    import tensorflow as tf

    # As many as a rank has cores here.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rows = []
    with gradring.init() as comm:
        for density, shared in itertools.product(DENSITIES, SHARED):
            common = round(ROWS * density * shared)
            own = round(ROWS * density) - common
            if common + own * comm.world_size <= ROWS:
                rows += _measure(comm, density, shared, _gradient(comm, common, own), rounds)
        comm.barrier()
    return rows


def _gradient(comm: gradring.Communicator, common: int, own: int) -> Any:
    import tensorflow as tf

    order = np.random.default_rng(0).permutation(ROWS)
    first = common + comm.rank * own
    indices = np.concatenate([order[:common], order[first : first + own]])
    random = np.random.default_rng(1 + comm.rank)
    random.shuffle(indices)
    values = random.standard_normal((indices.size, COLUMNS), np.float32)
    return tf.IndexedSlices(
        tf.constant(values), tf.constant(indices), tf.constant([ROWS, COLUMNS], tf.int64)
    )


def _measure(
    comm: gradring.Communicator, density: float, shared: float, gradient: Any, rounds: int
) -> list[Row]:
    steps, sent, tables = {}, {}, {}
    for way in WAYS:
        if way == "owners" and comm.world_size == 2:
            continue
        with _forced(way):
            steps[way] = _step(comm, gradient)
            tables[way] = steps[way]()
        before = comm.stats()["bytes_sent"]
        steps[way]()
        sent[way] = comm.stats()["bytes_sent"] - before
    for table in tables.values():
        np.testing.assert_allclose(table(), tables["table"](), CLOSE, CLOSE)
    seconds = in_turns(comm, steps, rounds, warm_ups=WARM_UPS)
    return [
        Row(
            density,
            shared,
            way,
            round(sent[way] / 1e6, 3),
            round(statistics.median(measured.ravel()) * 1e3, 2),
        )
        for way, measured in seconds.items()
    ]


def _step(comm: gradring.Communicator, gradient: Any) -> Callable[[], Callable[[], Any]]:
    """Reduces; returns what makes a table of the result."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    @tf.function  # type: ignore[untyped-decorator]
    def reduced(values: Any, indices: Any) -> Any:
        slices = tf.IndexedSlices(values, indices, tf.constant([ROWS, COLUMNS], tf.int64))
        result = all_reduce(slices, "sum", "embedding", comm)
        return result.values, result.indices

    def step() -> Callable[[], Any]:
        values, indices = reduced(gradient.values, gradient.indices)
        float(values[0, 0])
        return lambda: tf.math.unsorted_segment_sum(values, indices, ROWS).numpy()

    return step


@contextlib.contextmanager
def _forced(way: str) -> Any:
    """Has what is traced meanwhile go one way."""
    from gradring.tensorflow.graph import sparse

    free = sparse.travels_dense, sparse.owners_may_pay, sparse._message_bytes
    if way != "chosen":
        import tensorflow as tf

        sparse.travels_dense = lambda *_: tf.constant(way == "table")
        sparse.owners_may_pay = lambda *_: tf.constant(way == "owners")
        sparse._message_bytes = lambda communicator: -(1 << 40)
    try:
        yield
    finally:
        sparse.travels_dense, sparse.owners_may_pay, sparse._message_bytes = free


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_rate(None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_rounds(5)
    parser.add_record()
    options = parser.parse(arguments)
    with network(hosts=options.ranks if options.rate else 1, rate=options.rate) as hosts:
        rows: list[Row] = run_ranks(
            rank_main, options.ranks, options.rounds, hosts=hosts, timeout=TIMEOUT_S
        )[0]
    where = f"simulated hosts, links of {options.rate}" if options.rate else "one host"
    print(f"# {options.ranks} ranks, {where}; a table of {ROWS} rows of {COLUMNS} float32")
    print_surroundings("tensorflow")
    print(f"{'rows':>5} {'shared':>6}  " + "  ".join(f"{way:>8} MB      ms" for way in WAYS))
    for case, ways in itertools.groupby(rows, lambda row: (row.density, row.shared)):
        found = {row.way: f"{row.sent_mb:11.2f} {row.median_ms:7.1f}" for row in ways}
        cells = "  ".join(found.get(way, f"{'-':>11} {'-':>7}") for way in WAYS)
        print(f"{case[0]:5.0%} {case[1]:6.0%}  {cells}")
    write(options.json, rows)


if __name__ == "__main__":
    main()
