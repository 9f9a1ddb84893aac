"""Time of a training step: `python -m benches.training_steps`.

Two workers, with one thread each, train the same model with the same program in four ways,
interleaved round by round:

* *alone*: one worker without a strategy, while the other one sleeps;
* *apart*: both at the same time, but each for itself: what two workers could reach at best here;
* *gradring*: both under `CustomCollectiveStrategy`;
* *mirrored*: both under `MultiWorkerMirroredStrategy`, with its ring.

A worker's batch is the same in all of them, so two workers do twice the work of one. `rate` is
how many times as many samples per second as *alone*; 2 would be perfect. After the last step the
weights of all ranks must be equal, and those of gradring close to those of MWMS.

`--rate 1gbit` puts each worker on a simulated host of its own with such a link, as root.

On a machine with other work to do, look at the ratios.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings, write
from gradring.testing import Host, run_ranks
from gradring.tools.bench.measurement import P99_ITERATIONS
from gradring.tools.bench.network import network

WORKERS = 2
WAYS = ("alone", "apart", "gradring", "mirrored")
#: Of four hidden layers between 784 inputs and 10 classes. A step of the tiny one is nearly all
#: overhead: what a strategy adds to it, it adds to every step.
MLP_WIDTHS = {"mlp-tiny": 8, "mlp-1m": 460, "mlp-10m": 1700, "mlp-25m": 2760}
MODELS = (*MLP_WIDTHS, "cnn")
INPUTS, CLASSES = 784, 10
WARM_UP_STEPS = 3
#: Between weights of two strategies, which add in different orders.
CLOSE = 1e-3


@dataclass(frozen=True)
class Row:
    """One model: milliseconds of a step by way, the median of all, p90, and p99 of 100 or more;
    and rates over *alone*."""

    model: str
    parameters: int
    batch: int
    rounds: int
    ms_per_step: dict[str, float]
    p90_ms: dict[str, float]
    p99_ms: dict[str, float | None]
    rate: dict[str, float]

    def times(self, way: str) -> str:
        """p50, p90 and p99 in milliseconds, as text."""
        p99_ms = self.p99_ms[way]
        last = "-" if p99_ms is None else f"{p99_ms:.1f}"
        return f"{self.ms_per_step[way]:.1f} / {self.p90_ms[way]:.1f} / {last}"


def rank_main(
    model: str, batch: int, rounds: int, steps: int
) -> tuple[int, dict[str, list[float]]]:
    """Trains in all ways in turn; number of parameters, and seconds of each step."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import gradring
    from gradring.tools.bench.systems.tensorflow import configure

    with gradring.init() as comm:
        configure(comm)
        import tensorflow as tf

        from gradring.tensorflow import CustomCollectiveStrategy

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        ring = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        mirrored = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
        strategies = {
            "alone": tf.distribute.get_strategy(),
            "apart": tf.distribute.get_strategy(),
            "gradring": CustomCollectiveStrategy(communicator=comm),
            "mirrored": mirrored,
        }
        x, y = _samples(comm.rank, batch)
        trainings = {way: _Training(strategies[way], model, x, y) for way in WAYS}
        ways = {
            way: training.step if way != "alone" or comm.rank == 0 else None
            for way, training in trainings.items()
        }
        found = in_turns(comm, ways, rounds, steps, warm_ups=WARM_UP_STEPS)
        # Of the slower worker; the other one is not done before it either.
        times = {w: comm.all_reduce(s, op="max").ravel().tolist() for w, s in found.items()}
        _check(comm, trainings)
        comm.barrier()
        return trainings["alone"].parameters(), times


class _Training:
    """One model and its optimizer under one strategy; the program is the same for all."""

    def __init__(self, strategy: Any, name: str, x: Any, y: Any) -> None:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = _model(keras, name)
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            optimizer.build(self.model.trainable_variables)
        loss_of = tf.nn.sparse_softmax_cross_entropy_with_logits
        global_batch = len(x) * strategy.num_replicas_in_sync
        batch = (tf.constant(x), tf.constant(y))

        def replica_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = loss_of(labels=y, logits=self.model(x, training=True))
                loss = tf.reduce_sum(losses) / global_batch
            gradients = tape.gradient(loss, self.model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss

        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

        #: Trains, and waits for the loss.
        self.step: Callable[[], object] = lambda: float(step(*batch))

    def parameters(self) -> int:
        return int(self.model.count_params())

    def weights(self) -> Any:
        return np.concatenate([weight.ravel() for weight in self.model.get_weights()])


def _model(keras: Any, name: str) -> Any:
    layers = keras.layers
    hidden: list[Any]
    if name == "cnn":
        hidden = [
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ]
    else:
        hidden = [layers.Dense(MLP_WIDTHS[name], activation="relu") for _ in range(4)]
    return keras.Sequential([layers.Input((INPUTS,)), *hidden, layers.Dense(CLASSES)])


def _samples(rank: int, batch: int) -> tuple[Any, Any]:
    random = np.random.default_rng(rank)
    x = random.normal(size=(batch, INPUTS)).astype(np.float32)
    return x, random.integers(0, CLASSES, batch)


def _check(comm: Any, trainings: dict[str, _Training]) -> None:
    """All ranks have the same weights under a strategy, and both strategies have much the same."""
    for way in ("gradring", "mirrored"):
        weights = trainings[way].weights()
        first = weights.copy()
        comm.broadcast(first)
        assert np.array_equal(weights, first), f"{way}: the ranks' weights differ"
    ours, theirs = (trainings[way].weights() for way in ("gradring", "mirrored"))
    distance = float(np.abs(ours - theirs).max())
    assert distance < CLOSE, f"gradring's weights differ from MWMS's by {distance:g}"
    assert not np.array_equal(ours, trainings["apart"].weights()), "nothing was reduced"


def measure(model: str, batch: int, rounds: int, steps: int, hosts: Sequence[Host] = ()) -> Row:
    """One row, from two fresh processes."""
    parameters, times = run_ranks(
        rank_main, WORKERS, model, batch, rounds, steps, timeout=TIMEOUT_S, hosts=hosts
    )[0]
    quantiles_ms = {
        way: (1e3 * np.quantile(times[way], (0.5, 0.9, 0.99))).round(3).tolist() for way in WAYS
    }
    ms, p90_ms, p99_ms = ({way: quantiles_ms[way][i] for way in WAYS} for i in range(3))
    enough = rounds * steps >= P99_ITERATIONS
    return Row(
        model,
        parameters,
        batch,
        rounds,
        ms,
        p90_ms,
        {way: p99_ms[way] if enough else None for way in WAYS},
        {way: round(WORKERS * ms["alone"] / ms[way], 4) for way in WAYS[1:]},
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="default %(default)s")
    parser.add_argument("--batch", type=int, default=128, help="samples of each worker")
    parser.add_rounds(20)
    parser.add_argument("--steps", type=int, default=5, help="of each way in each round")
    parser.add_rate(None, "each worker's link")
    parser.add_record()
    options = parser.parse(arguments)
    models = options.models.split(",")
    if unknown := set(models) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    print_surroundings("tensorflow")
    print(f"# {WORKERS} workers of one thread, {options.batch} samples each; ms of a step:")
    print("# p50 / p90 / p99 of all steps (p99 of 100 or more), and the rate")
    print(f"{'model':>8} {'parameters':>11} {'alone':>21}", end="")
    print("".join(f" {way:>21} {'rate':>5}" for way in WAYS[1:]), "mirrored/gradring")
    rows = []
    with network(hosts=WORKERS if options.rate else 1, rate=options.rate) as hosts:
        for model in models:
            row = measure(model, options.batch, options.rounds, options.steps, hosts)
            rows.append(row)
            ms = row.ms_per_step
            print(f"{row.model:>8} {row.parameters:11,} {row.times('alone'):>21}", end="")
            ways = (f" {row.times(way):>21} {row.rate[way]:5.2f}" for way in WAYS[1:])
            print("".join(ways), f"{ms['mirrored'] / ms['gradring']:16.2f}x", flush=True)
    write(options.json, rows)


if __name__ == "__main__":
    main()
