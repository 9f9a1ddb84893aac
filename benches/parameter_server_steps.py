"""Steps per second of parameter servers: `python -m benches.parameter_server_steps`.

One process serves the weights of a model, and two work: each trains on batches of its own and lets
the server apply every gradient at once, which is all that `tf.distribute.ParameterServerStrategy`
offers. It takes another process there, the coordinator, which schedules every step of the workers.
Keras 3 does not train under it, so its model is TensorFlow's own variables and its SGD a line. Both
compute the same step, and take turns with two other kinds: steps of both workers without servers,
and a raw link, plain sockets by which each worker sends and receives the bytes of gradring's step.

Hidden is the part of the raw link's time that does not make a step longer: 1 - (gradring - without
servers) / raw link. `waited` is the part of a step that a worker spends in its pull.

With `--rate`, each process has a simulated host; this needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradring
from benches import raw_link
from benches.harness import TIMEOUT_S, Parser, in_turns, print_surroundings
from benches.raw_link import RawLink
from benches.update_rules import served_strategy, serving
from gradring import updates
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.testing import run_ranks
from gradring.testing.network import Host
from gradring.tools.bench.network import network

WORKERS = 2
#: Ranks of the benchmark after the workers.
SERVER, COORDINATOR = WORKERS, WORKERS + 1
PROCESSES = WORKERS + 2
CLASSES = 10
RATE = 0.001
#: Trains so many steps on each worker.
Turn = Callable[[int], None]
RULE = updates.ParameterServer(staleness=None)
GRADRING, TENSORFLOW, APART, LINK = "gradring", "TensorFlow", "no servers", "raw link"


@dataclass(frozen=True)
class Network:
    """The shapes of its weights, and one batch.

    Attributes:
        shapes: Kernels of convolutions, which have four dimensions, and of dense layers. If the
            inputs are words, the first is their embeddings.
        inputs: Shape of an example; `()` is a word.
        batch: Number of examples.
        steps: Number of steps in one turn.
    """

    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    batch: int
    steps: int


def _dense(*widths: int) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.pairwise((*widths, CLASSES)))


#: By the word for the command line.
NETWORKS = {
    "small": Network(_dense(64, 64), (64,), batch=8, steps=300),
    "100mib": Network(_dense(64, 3584, 3584, 3584), (64,), batch=8, steps=6),
    "convolutions": Network(
        (
            (3, 3, 3, 64),
            *((3, 3, one, other) for one, other in itertools.pairwise((64, 128, 256, 512))),
            *_dense(512),
        ),
        (32, 32, 3),
        batch=32,
        steps=6,
    ),
    # Words whose frequency is that of their rank (Zipf).
    "embedding": Network(((1 << 20, 32), *_dense(32)), (), batch=4096, steps=20),
}


@dataclass(frozen=True)
class Measured:
    """Of one process.

    Attributes:
        turns: Seconds of each turn, by kind; those of the coordinator count.
        waited: Seconds in pulls, in all of gradring's turns after the first.
        sent: Bytes that a worker sends in a step of gradring.
        received: Bytes that it receives.
    """

    turns: dict[str, Any]
    waited: float = 0.0
    sent: int = 0
    received: int = 0


def rank_main(
    network: Network, rounds: int, hosts: Sequence[str], cluster: dict[str, list[str]]
) -> Measured:
    """Takes part in all turns."""
    with gradring.init(stall_timeout=TIMEOUT_S) as comm, contextlib.ExitStack() as stack:
        ports = comm.broadcast(np.array(free_ports(2)), root=SERVER)
        address, link = (f"{hosts[SERVER]}:{port}" for port in ports)
        turns: dict[str, Turn] = dict.fromkeys((GRADRING, TENSORFLOW, APART, LINK), _nothing)
        worker = None
        if comm.rank == SERVER:
            stack.enter_context(serving(RULE, address, WORKERS))
            raw_link.serve(link)
        comm.barrier()
        if comm.rank < WORKERS:
            _one_thread()
            strategy = served_strategy(RULE, comm.rank, WORKERS, [address])
            worker = Worker(network, stack.enter_context(strategy), link)
            turns |= {GRADRING: worker.train, APART: worker.train_apart, LINK: worker.exchange}
        elif comm.rank == COORDINATOR:
            _one_thread()
            turns[TENSORFLOW] = _coordinator(cluster, network)

        def whole(turn: Turn) -> Callable[[], None]:
            """Ends when it has ended on all."""

            def train() -> None:
                turn(network.steps)
                comm.barrier()

            return train

        seconds = in_turns(
            comm, {name: whole(it) for name, it in turns.items()}, rounds, warm_ups=1
        )
        if worker is None:
            return Measured(seconds)
        return Measured(seconds, worker.waited, *worker.bytes_of_step)


def _nothing(steps: int) -> None:
    """What a process does in the turn of others."""


def _one_thread() -> None:
    """Gives TensorFlow as many threads as a worker has cores here."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)


class Worker:
    """Trains under gradring, with Keras, and alone."""

    def __init__(self, network: Network, strategy: Any, link: str) -> None:
        """Makes two models, and connects the raw link."""
        import keras
        import tensorflow as tf

        self._strategy = strategy
        with strategy.scope():
            variables = [tf.Variable(value) for value in _initial(network)]
            optimizer = keras.optimizers.SGD(RATE)
            optimizer.build(variables)
        alone = [tf.Variable(value) for value in _initial(network)]

        def replica_step() -> None:
            gradients = _gradients(network, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        self._step = tf.function(lambda: strategy.run(replica_step))
        self._step_apart = tf.function(lambda: _descend(alone, _gradients(network, alone)))
        self._link = RawLink(link)
        #: Of the last turn, sent and received.
        self.bytes_of_step = (0, 0)
        self.waited = 0.0
        self._trained = False

    def train(self, steps: int) -> None:
        """Takes steps with gradring's server."""
        before = self._counts() if self._trained else {}
        for _ in range(steps):
            self._step()
        if before:
            now = self._counts()
            sent, received, waited = (now[name] - before[name] for name in before)
            self.bytes_of_step = (int(sent) // steps, int(received) // steps)
            self.waited += waited
        self._trained = True

    def train_apart(self, steps: int) -> None:
        """Takes steps of a model that no server has."""
        for _ in range(steps):
            self._step_apart()

    def exchange(self, steps: int) -> None:
        """Sends and receives the bytes of gradring's steps by plain sockets."""
        sent, received = self.bytes_of_step
        for _ in range(steps):
            self._link.exchange(sent, received)

    def _counts(self) -> dict[str, Any]:
        stats = self._strategy.update_stats()
        return {name: stats[name] for name in ("bytes_sent", "bytes_received", "waited_s")}


def _coordinator(cluster: dict[str, list[str]], network: Network) -> Turn:
    """Has the workers of TensorFlow's strategy train so many steps each."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [tf.Variable(value) for value in _initial(network)]

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        strategy.run(lambda: _descend(variables, _gradients(network, variables)))

    def train(steps: int) -> None:
        for _ in range(WORKERS * steps):
            coordinator.schedule(step)
        coordinator.join()

    return train


def _descend(variables: Sequence[Any], gradients: Sequence[Any]) -> None:
    """A step of SGD."""
    import tensorflow as tf

    for variable, gradient in zip(variables, gradients, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
        else:
            variable.assign_sub(RATE * gradient)


def _initial(network: Network) -> list[Any]:
    draw = np.random.default_rng(1)
    return [
        draw.standard_normal(shape, np.float32) / np.float32(np.prod(shape[:-1]) ** 0.5)
        for shape in network.shapes
    ]


def _gradients(network: Network, variables: Sequence[Any]) -> list[Any]:
    """Of a network with tanh, for a batch of its own."""
    import tensorflow as tf

    layers = list(variables)
    labels = tf.random.uniform([network.batch], maxval=CLASSES, dtype=tf.int32)
    values = tf.random.uniform([network.batch, *network.inputs])
    with tf.GradientTape() as tape:
        if not network.inputs:
            words = layers.pop(0)
            numbers = tf.cast(tf.exp(values * np.log(words.shape[0])), tf.int32) - 1
            values = tf.tanh(tf.gather(words, numbers))
        for index, layer in enumerate(layers):
            if len(layer.shape) == 4:
                values = tf.tanh(tf.nn.conv2d(values, layer, strides=1, padding="SAME"))
                values = tf.nn.avg_pool2d(values, 2, 2, "SAME")
            else:
                if len(values.shape) == 4:
                    values = tf.reduce_mean(values, [1, 2])
                values = values @ layer
                if index < len(layers) - 1:
                    values = tf.tanh(values)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=values)
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
def _tensorflow_cluster(
    hosts: Sequence[Host], names: Sequence[str]
) -> Iterator[dict[str, list[str]]]:
    ports = zip(names, free_ports(PROCESSES), strict=True)
    at = [f"{name}:{port}" for name, port in ports]
    cluster = {"worker": at[:WORKERS], "ps": [at[SERVER]], "chief": [at[COORDINATOR]]}
    command = [sys.executable, "-m", "benches.parameter_server_steps", json.dumps(cluster)]
    tasks = [("worker", index) for index in range(WORKERS)] + [("ps", 0)]
    started: list[subprocess.Popen[str]] = []
    try:
        for place, (job, index) in enumerate(tasks):
            task = [*command, job, str(index)]
            there = hosts[place].command(*task) if hosts else task
            started.append(subprocess.Popen(there, stdout=subprocess.PIPE, text=True))
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
    parser.add_argument("--model", choices=NETWORKS, default="100mib")
    parser.add_rate(None)
    parser.add_rounds(7)
    options = parser.parse(arguments)
    print_surroundings("tensorflow")
    model = NETWORKS[options.model]
    with network(hosts=PROCESSES if options.rate else 1, rate=options.rate) as hosts:
        names = [host.address for host in hosts] or [LOOPBACK] * PROCESSES
        with _tensorflow_cluster(hosts, names) as cluster:
            given = (model, options.rounds, names, cluster)
            ranks = run_ranks(rank_main, PROCESSES, *given, hosts=hosts, timeout=TIMEOUT_S)
    _print(model, options.rate, options.rounds, list(ranks))


def _print(model: Network, rate: str | None, rounds: int, ranks: list[Measured]) -> None:
    size = sum(4 * int(np.prod(shape)) for shape in model.shapes)
    links = f"links of {rate}" if rate else "one host"
    print(f"# {size / 2**20:.3g} MiB of weights, {WORKERS} workers, 1 server, {links}")
    worker = ranks[0]
    mib = [f"{count / 2**20:.3g} MiB" for count in (worker.sent, worker.received)]
    print(f"# a step sends {mib[0]} and receives {mib[1]}")
    times = {name: seconds.ravel() for name, seconds in ranks[COORDINATOR].turns.items()}
    rates = {name: WORKERS * model.steps / seconds for name, seconds in times.items()}
    for name, each in rates.items():
        print(
            f"{name:10} {statistics.median(each):8.2f} steps/s, {min(each):.2f} to {max(each):.2f}"
        )

    def show(words: str, each: Any) -> None:
        print(f"{words}: {statistics.median(each):.2f}, {min(each):.2f} to {max(each):.2f}")

    show("gradring / TensorFlow", rates[GRADRING] / rates[TENSORFLOW])
    show("gradring / raw link", rates[GRADRING] / rates[LINK])
    show("hidden", 1 - (times[GRADRING] - times[APART]) / times[LINK])
    waited = statistics.mean(it.waited for it in ranks[:WORKERS]) / rounds
    print(f"waited: {waited / statistics.mean(times[GRADRING]):.2f} of a step")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2] in ("worker", "ps"):
        _serve_tensorflow(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
