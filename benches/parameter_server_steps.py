"""Steps per second against TensorFlow: `python -m benches.parameter_server_steps`.

One process serves the weights of a model, and two work: each trains on batches of its own and lets
the server apply every gradient at once, which is all that `tf.distribute.ParameterServerStrategy`
offers. It takes another process there, the coordinator, which schedules every step of the workers.
Keras 3 does not train under it, so its model is TensorFlow's own variables and its SGD a line. Both
compute the same step, and take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import gradring
from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings
from benches.update_rules import served_strategy, serving
from gradring import updates
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.testing import run_ranks

WORKERS = 2
#: Ranks of the benchmark after the workers.
SERVER, COORDINATOR = WORKERS, WORKERS + 1
CLASSES, INPUTS, BATCH = 10, 64, 8
RATE = 0.001
#: Of the model of embeddings: words, numbers for each, and words in a batch.
WORDS, WIDTH, WORDS_OF_BATCH = 1 << 20, 32, 4096
#: By the word for the command line: the widths of hidden layers, or none for a table of embeddings
#: in front of the classes; and steps in one turn.
MODELS: dict[str, tuple[tuple[int, ...], int]] = {
    "small": ((64,), 300),
    "100mib": ((3584, 3584, 3584), 6),
    "embedding": ((), 20),
}
#: Trains so many steps on each worker.
Turn = Callable[[int], None]
RULE = updates.ParameterServer(staleness=None)


def rank_main(model: str, rounds: int, cluster: dict[str, list[str]]) -> dict[str, Any]:
    """Seconds of each turn; those of the coordinator count."""
    hidden, steps = MODELS[model]
    with gradring.init(stall_timeout=TIMEOUT_S) as comm, contextlib.ExitStack() as stack:
        port = comm.broadcast(np.array(free_ports(1)), root=SERVER)[0]
        address = f"{LOOPBACK}:{port}"
        own: Turn = _nothing
        others: Turn = _nothing
        if comm.rank == SERVER:
            stack.enter_context(serving(RULE, address, WORKERS))
        comm.barrier()
        if comm.rank < WORKERS:
            own = stack.enter_context(_worker(comm.rank, address, hidden))
        elif comm.rank == COORDINATOR:
            others = _coordinator(cluster, hidden)

        def whole(turn: Turn) -> Callable[[], None]:
            """Ends when it has ended on all."""

            def train() -> None:
                turn(steps)
                comm.barrier()

            return train

        turns = {"gradring": whole(own), "TensorFlow": whole(others)}
        return in_turns(comm, turns, rounds, warm_ups=1)


def _nothing(steps: int) -> None:
    """What a process does in the turn of others."""


@contextlib.contextmanager
def _worker(rank: int, address: str, hidden: tuple[int, ...]) -> Iterator[Turn]:
    """Trains so many steps under gradring, with Keras."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    with served_strategy(RULE, rank, WORKERS, [address]) as strategy:
        with strategy.scope():
            variables = [tf.Variable(value) for value in _initial(hidden)]
            optimizer = keras.optimizers.SGD(RATE)
            optimizer.build(variables)

        def replica_step() -> None:
            gradients = _gradients(variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        @tf.function  # type: ignore[untyped-decorator]
        def step() -> None:
            strategy.run(replica_step)

        def train(steps: int) -> None:
            for _ in range(steps):
                step()

        yield train


def _coordinator(cluster: dict[str, list[str]], hidden: tuple[int, ...]) -> Turn:
    """Has the workers of TensorFlow's strategy train so many steps each."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [tf.Variable(value) for value in _initial(hidden)]

    def replica_step() -> None:
        for variable, gradient in zip(variables, _gradients(variables), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                variable.scatter_sub(rows)
            else:
                variable.assign_sub(RATE * gradient)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        strategy.run(replica_step)

    def train(steps: int) -> None:
        for _ in range(WORKERS * steps):
            coordinator.schedule(step)
        coordinator.join()

    return train


def _initial(hidden: tuple[int, ...]) -> list[Any]:
    draw = np.random.default_rng(1)
    widths = (INPUTS, *hidden, CLASSES) if hidden else (WORDS, WIDTH, CLASSES)
    return [
        draw.standard_normal(pair, np.float32) / np.float32(pair[0] ** 0.5)
        for pair in itertools.pairwise(widths)
    ]


def _gradients(variables: list[Any]) -> list[Any]:
    """Of a network with tanh, for a batch of its own.

    Embeddings are those of words whose frequency is that of their rank (Zipf).
    """
    import tensorflow as tf

    has_words = len(variables) == 2 and variables[0].shape[0] == WORDS
    batch = WORDS_OF_BATCH if has_words else BATCH
    values = tf.random.uniform([batch, INPUTS])
    words = tf.cast(tf.exp(tf.random.uniform([batch]) * np.log(WORDS)), tf.int32) - 1
    labels = tf.random.uniform([batch], maxval=CLASSES, dtype=tf.int32)
    with tf.GradientTape() as tape:
        if has_words:
            values = tf.tanh(tf.gather(variables[0], words))
        for variable in [] if has_words else variables[:-1]:
            values = tf.tanh(values @ variable)
        logits = values @ variables[-1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(losses)
    return tape.gradient(loss, variables)  # type: ignore[no-any-return]


def _serve_tensorflow(cluster: str, job: str, index: int) -> None:
    """One task of TensorFlow's cluster; it ends when it is killed, there is no other way."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    spec = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(
        spec, job_name=job, task_index=index, protocol="grpc", config=config
    )
    print("ready", flush=True)
    server.join()


@contextlib.contextmanager
def _tensorflow_cluster() -> Iterator[dict[str, list[str]]]:
    ports = [f"{LOOPBACK}:{port}" for port in free_ports(WORKERS + 2)]
    cluster = {"worker": ports[:WORKERS], "ps": ports[WORKERS:-1], "chief": ports[-1:]}
    command = [sys.executable, "-m", "benches.parameter_server_steps", json.dumps(cluster)]
    tasks = [("worker", index) for index in range(WORKERS)] + [("ps", 0)]
    started: list[subprocess.Popen[str]] = []
    try:
        for job, index in tasks:
            task = [*command, job, str(index)]
            started.append(subprocess.Popen(task, stdout=subprocess.PIPE, text=True))
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield cluster
    finally:
        for process in started:
            process.kill()
            process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="100mib")
    parser.add_rounds(7)
    options = parser.parse(arguments)
    print_surroundings("tensorflow")
    with _tensorflow_cluster() as cluster:
        given = (options.model, options.rounds, cluster)
        turns = run_ranks(rank_main, WORKERS + 2, *given, timeout=TIMEOUT_S)[COORDINATOR]
    hidden, steps = MODELS[options.model]
    size = sum(weights.nbytes for weights in _initial(hidden))
    print(f"# {size / 2**20:.3g} MiB of weights, {WORKERS} workers, 1 server")
    rates = [(WORKERS * steps / seconds.ravel()).tolist() for seconds in turns.values()]
    for name, each in zip(turns, rates, strict=True):
        print(
            f"{name:10} {statistics.median(each):8.2f} steps/s, {min(each):.2f} to {max(each):.2f}"
        )
    ratios = [own / other for own, other in zip(*rates, strict=True)]
    print(f"{statistics.median(ratios):.2f} times as many, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2] in ("worker", "ps"):
        _serve_tensorflow(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
