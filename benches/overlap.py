"""The share of communication that the backward pass hides: `python -m benches.overlap`.

Two workers train an MLP of 25 million parameters (100 MB of gradients), or with `--model ResNet50`
that of keras.applications (94 MB, images of 32 x 32), in four ways, interleaved:

* *forward*: the forward pass alone;
* *compute*: forward and backward pass, no communication;
* *after*: the reduction starts when the backward pass has ended;
* *during*: as gradring does it.

`communication = after - compute` is what an unhidden reduction costs, `backward = compute -
forward` what could hide it, and `saved = after - during` what was saved, all by the clock on the
wall, so that computation slowed down by communication counts against it. `hidden` is, by the
counters of `measure_overlap`, how much less time a step is blocked than in *after*. Both shares
are of what the backward pass could hide: of the communication, or of the backward pass if that is
shorter. The bucket that gets ready last, of the MLP 8 of 100 MB, cannot be hidden at all.

Where workers compute on all cores, hidden communication still takes computing time, and less is
saved than hidden: over loopback, where all of it is computing, nothing. `--rate 5gbit` puts each
worker on a host of its own with such a link (as root), where communication is mostly waiting, as
it is between machines.

On a machine with other work to do, look at the quietest rounds too: noise only adds.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benches.harness import Parser, in_turns, print_surroundings, slowest
from benches.model_steps import KINDS
from gradring.testing import run_ranks
from gradring.tools.bench.network import network

SIZES = (1024, 2048, 2048, 2048, 2048, 2048, 2048, 1000)
MODES = ("forward", "compute", "after", "during")

#: The shape of a batch, the weights, and the loss of a batch.
Built = tuple[tuple[int, ...], list[Any], Callable[[Any], Any]]


def _mlp(tf: Any) -> Built:
    weights = [
        tf.Variable(tf.random.normal([rows, columns], stddev=rows**-0.5), name=f"kernel_{i}")
        for i, (rows, columns) in enumerate(itertools.pairwise(SIZES))
    ]

    def loss_of(x: Any) -> Any:
        for weight in weights[:-1]:
            x = tf.nn.relu(x @ weight)
        return tf.reduce_mean((x @ weights[-1]) ** 2)

    return (256, SIZES[0]), weights, loss_of


def _resnet50(tf: Any) -> Built:
    kind = KINDS["ResNet50"]
    model = kind.build(tf.keras)
    return (
        (kind.batch, kind.side, kind.side, 3),
        model.trainable_variables,
        lambda x: tf.reduce_mean(model(x, training=True) ** 2),
    )


MODELS = {"mlp": _mlp, "ResNet50": _resnet50}


def rank_main(
    model: str, batch: int | None, rounds: int, threads: int, bucket_mib: float
) -> dict[str, Any]:
    """Runs all modes in turn; returns this rank's times in milliseconds."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    import gradring
    from gradring.tensorflow import GradientReducer, broadcast_variables, measure_overlap

    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with gradring.init() as comm:
        (usual, *shape), weights, loss_of = MODELS[model](tf)
        broadcast_variables(weights, communicator=comm)
        reduce_gradients = GradientReducer(bucket_bytes=int(bucket_mib * 2**20), communicator=comm)
        x = tf.random.stateless_normal([batch or usual, *shape], [1, comm.rank])
        overlaps: dict[str, list[Any]] = {mode: [] for mode in MODES}
        values = {}

        def measured(mode: str) -> Callable[[], None]:
            step = _step(tf, mode, weights, loss_of, reduce_gradients)

            def run() -> None:
                with measure_overlap(comm) as overlap:
                    values[mode] = step(x).numpy().tobytes()
                overlaps[mode].append(overlap)

            return run

        times = in_turns(comm, {mode: measured(mode) for mode in MODES}, rounds, warm_ups=2)
        exposed = {m: [o.exposed_s * 1e3 for o in found[2:]] for m, found in overlaps.items()}
        assert values["after"] == values["during"] != values["compute"], "wrong gradients"
        return {
            "values": values["during"].hex(),
            "times": {mode: 1e3 * steps_s[:, 0] for mode, steps_s in times.items()},
            "exposed": {mode: np.array(found) for mode, found in exposed.items()},
        }


def _step(
    tf: Any, mode: str, weights: list[Any], loss_of: Callable[[Any], Any], reduce: Any
) -> Callable[[Any], Any]:
    """A compiled step that returns one element of each gradient."""

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        if mode == "forward":
            return loss
        gradients = tape.gradient(loss, weights)
        if mode == "after":
            with tf.control_dependencies(gradients):
                # Not an identity, which would be optimised away with its dependencies.
                gradients = [gradient * 1.0 for gradient in gradients]
        if mode in ("after", "during"):
            gradients = reduce(gradients, weights)
        return tf.stack([tf.reshape(gradient, [-1])[0] for gradient in gradients])

    return step  # type: ignore[no-any-return]


def summary(
    ranks: list[dict[str, Any]], over_rounds: Callable[[list[float]], float]
) -> dict[str, float]:
    """What the slower rank needed, in milliseconds, and the shares."""
    typical, exposed = (
        {mode: over_rounds(ms.tolist()) for mode, ms in slowest([r[what] for r in ranks]).items()}
        for what in ("times", "exposed")
    )
    communication = typical["after"] - typical["compute"]
    backward = typical["compute"] - typical["forward"]
    possible = min(communication, backward)
    saved = typical["after"] - typical["during"]
    return {
        **{f"{mode}_ms": time for mode, time in typical.items()},
        "backward_ms": backward,
        "communication_ms": communication,
        "saved_ms": saved,
        "saved_share_of_possible": saved / possible,
        "exposed_after_ms": exposed["after"],
        "exposed_during_ms": exposed["during"],
        "hidden_by_counters_ms": exposed["after"] - exposed["during"],
        "hidden_share_of_possible": (exposed["after"] - exposed["during"])
        / min(exposed["after"], backward),
    }


def main() -> None:
    """Runs the benchmark and prints the summary."""
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--batch", type=int, help="samples of each worker")
    parser.add_rounds(15)
    parser.add_argument("--threads", type=int, default=1, help="inter-op threads of each worker")
    parser.add_argument("--bucket-mib", type=float, default=16)
    parser.add_rate(None)
    options = parser.parse()
    arguments = (
        *(options.model, options.batch, options.rounds),
        *(options.threads, options.bucket_mib),
    )
    with network(hosts=2 if options.rate else 1, rate=options.rate) as hosts:
        ranks = run_ranks(rank_main, 2, *arguments, hosts=hosts)
    assert ranks[0]["values"] == ranks[1]["values"], "the ranks' gradients differ"
    median, quietest = summary(ranks, statistics.median), summary(ranks, min)
    print_surroundings("tensorflow")
    print(f"# {options}")
    print(f"{'':28} {'median':>9} {'quietest':>9}")
    for name, value in median.items():
        print(f"{name:28} {value:9.2f} {quietest[name]:9.2f}")


if __name__ == "__main__":
    main()
