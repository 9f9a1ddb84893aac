"""Ways to reduce gradients of embeddings: `python -m benches.sparse_gradients`.

Ranks have rows of a table, some of which all of them share, and the others of which no two do. The
ways take turns: *rows*, gathered from all by all; *owners*, which add rows up and send the sums;
the whole *table*; and what is *chosen*. `sent` is what a rank sends, in MB of 1e6 bytes. With
`--rate`, as root, ranks are on simulated hosts that are joined by links of this rate.

With `--models`, two models train with Adam instead, by `embeddings="rows"` and `"sum"` in turns:
*text*, a classifier of 32 texts of 200 words on each rank; and *pairs*, word2vec by 1024 words on
each rank with one word beside each and five that are not. Words occur as often as in a language.
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
from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings
from gradring.gradients.checks import Embeddings
from gradring.testing import run_ranks
from gradring.tools.bench.network import network

#: Rows and columns of the table, of float32: 26 MB.
ROWS, COLUMNS = 100_000, 64
#: Of the table's rows, how many a rank has; and of these, how many all ranks share.
DENSITIES, SHARED = (0.01, 0.1, 0.4), (0.0, 0.5, 1.0)
WAYS = ("rows", "owners", "table", "chosen")
WARM_UPS = 2
#: Of the models: words, the size of a vector, and steps in a round.
WORDS, WIDTH, STEPS = 20_000, 128, 5
TEXTS, LENGTH, PAIRS, SAMPLED = 32, 200, 1024, 6
EMBEDDINGS: tuple[Embeddings, ...] = ("rows", "sum")
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
        result = all_reduce(slices, "sum", "embedding", comm, embeddings="sum")
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


@dataclass(frozen=True)
class ModelRow:
    """A model's step by one way."""

    model: str
    embeddings: str
    sent_mb: float
    median_ms: float


def models_main(rounds: int) -> list[ModelRow]:
    """Measures the models; only rank 0's rows count."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    rows = []
    with gradring.init() as comm:
        for model, loss_of in (("text", _text), ("pairs", _pairs)):
            steps: dict[str, Callable[[], Any]] = {
                each: _model_step(comm, loss_of, each) for each in EMBEDDINGS
            }
            sent = {}
            for each, step in steps.items():
                step()
                before = comm.stats()["bytes_sent"]
                step()
                sent[each] = comm.stats()["bytes_sent"] - before
            seconds = in_turns(comm, steps, rounds, STEPS, warm_ups=WARM_UPS)
            rows += [
                ModelRow(
                    model,
                    each,
                    round(sent[each] / 1e6, 3),
                    round(statistics.median(measured.ravel()) * 1e3, 2),
                )
                for each, measured in seconds.items()
            ]
        comm.barrier()
    return rows


def _words(rank: int, *shape: int) -> Any:
    """Words by Zipf's law: the second one occurs half as often as the first, and so on."""
    often = 1.0 / np.arange(1, WORDS + 1)
    return np.random.default_rng(rank).choice(WORDS, shape, p=often / often.sum())


def _text(rank: int) -> tuple[list[Any], Callable[[], Any]]:
    import tensorflow as tf

    texts = tf.constant(_words(rank, TEXTS, LENGTH))
    labels = tf.constant(np.random.default_rng(rank).integers(0, 2, TEXTS), tf.float32)
    table = tf.Variable(tf.random.normal([WORDS, WIDTH], seed=1), name="table")
    kernel = tf.Variable(tf.random.normal([WIDTH, 1], seed=2), name="kernel")

    def loss() -> Any:
        outputs = tf.reduce_mean(tf.gather(table, texts), 1) @ kernel
        losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, outputs[:, 0])
        return tf.reduce_mean(losses)

    return [table, kernel], loss


def _pairs(rank: int) -> tuple[list[Any], Callable[[], Any]]:
    import tensorflow as tf

    words, beside = tf.constant(_words(rank, PAIRS)), tf.constant(_words(rank, PAIRS, SAMPLED))
    tables = [
        tf.Variable(tf.random.normal([WORDS, WIDTH], seed=seed), name=name)
        for seed, name in ((1, "words"), (2, "contexts"))
    ]
    labels = tf.one_hot(tf.zeros([PAIRS], tf.int32), SAMPLED)

    def loss() -> Any:
        vectors, contexts = tf.gather(tables[0], words), tf.gather(tables[1], beside)
        outputs = tf.einsum("bw,bsw->bs", vectors, contexts)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, outputs))

    return tables, loss


def _model_step(
    comm: gradring.Communicator, loss_of: Callable[[int], Any], embeddings: Embeddings
) -> Callable[[], float]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    variables, loss = loss_of(comm.rank)
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    reduce_gradients = GradientReducer(communicator=comm, embeddings=embeddings)

    @tf.function  # type: ignore[untyped-decorator]
    def trained() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        gradients = reduce_gradients(tape.gradient(value, variables), variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return value

    return lambda: float(trained())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_rate(None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_rounds(5)
    parser.add_argument("--models", action="store_true", help="train models instead")
    options = parser.parse(arguments)
    main_of_rank = models_main if options.models else rank_main
    with network(hosts=options.ranks if options.rate else 1, rate=options.rate) as hosts:
        rows: list[Any] = run_ranks(
            main_of_rank, options.ranks, options.rounds, hosts=hosts, timeout=TIMEOUT_S
        )[0]
    where = f"simulated hosts, links of {options.rate}" if options.rate else "one host"
    print(f"# {options.ranks} ranks, {where}")
    print_surroundings("tensorflow")
    (_print_models if options.models else _print)(rows)


def _print_models(rows: Sequence[ModelRow]) -> None:
    print(f"# tables of {WORDS} rows of {WIDTH} float32")
    print("model  embeddings       MB      ms")
    for row in rows:
        print(f"{row.model:6} {row.embeddings:10} {row.sent_mb:8.2f} {row.median_ms:7.1f}")


def _print(rows: Sequence[Row]) -> None:
    print(f"# a table of {ROWS} rows of {COLUMNS} float32")
    print(f"{'rows':>5} {'shared':>6}  " + "  ".join(f"{way:>8} MB      ms" for way in WAYS))
    for case, ways in itertools.groupby(rows, lambda row: (row.density, row.shared)):
        found = {row.way: f"{row.sent_mb:11.2f} {row.median_ms:7.1f}" for row in ways}
        cells = "  ".join(found.get(way, f"{'-':>11} {'-':>7}") for way in WAYS)
        print(f"{case[0]:5.0%} {case[1]:6.0%}  {cells}")


if __name__ == "__main__":
    main()
