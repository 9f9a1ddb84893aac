"""Every update rule trains the digits: `python -m benches.update_rules FILE.json`, as root.

Three workers and one server learn handwritten digits by each rule of `gradring demo --update` in
three situations: with equal workers, with one that is three times slower, and on hosts with links
of 1 Gbit/s in each direction, where the model is wider, so that its bytes take a while. Batches
that are computed would compete for the cores of one machine, so sleep stands for most of a step.
Nothing overlaps with it, as bytes do with the backward pass of a larger model.

Every few steps the first worker keeps its weights, and tests them when the training is over, so
that tests take no time of it. Bytes are those that all workers and servers have sent.

`benches.plot_rules` draws the record. Situations that are measured anew replace those in the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import gradring
from benches.harness import TIMEOUT_S, Parser
from gradring import updates
from gradring.launch.ranks import tf_config_of
from gradring.machine import resources
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.testing import run_ranks
from gradring.tools.bench.network import network
from gradring.tools.demo.rules import RULES as SHOWN
from gradring.tools.demo.rules import WORKERS

#: The rank that serves, after those that work.
SERVER = WORKERS
#: What a worker sleeps in a step.
STEP_S = 0.02
#: The worker that sleeps longer, and so many times as long.
SLOW, SLOWER = 2, 3.0
SEEDS = (1, 2, 3)
#: The test accuracy whose time is told.
GOAL = 0.95
#: The place in a launcher's group, which is not that of a worker of servers.
OF_GROUP = ("GRADRING_RANK", "GRADRING_WORLD_SIZE", "GRADRING_RENDEZVOUS")

#: Those of the demo, and one with a bound that the training does not come to. `Sharded` takes the
#: steps of `AllReduce`, with the same bits: `benches.sharded_updates` compares the two.
RULES = {name: rule for name, rule in SHOWN.items() if name != "sharded"} | {
    "bounded-staleness-64": updates.ParameterServer(staleness=64)
}
SERVED = tuple(name for name, rule in RULES.items() if isinstance(rule, updates.ParameterServer))
#: Steps between two tests.
TEST_EVERY = 4
#: Of Adam: of 0.005, 0.01 and 0.02 with equal workers, what learns soonest, or nearly so and ends
#: better.
RATES = dict.fromkeys(RULES, 0.02) | {
    "top-k": 0.01,
    "local-sgd": 0.01,
    "diloco": 0.01,
    "bounded-staleness": 0.005,
    "bounded-staleness-64": 0.005,
    "asynchronous": 0.005,
    "aggregation-queue": 0.005,
}


@dataclass(frozen=True)
class Situation:
    """What a training finds."""

    slower: float = 1.0
    rate: str | None = None
    hidden: tuple[int, ...] = (64,)
    #: Of the slowest worker.
    steps: int = 240
    #: Of learning rates: wider layers want smaller ones.
    rate_times: float = 1.0
    #: The learning rate of all rules, in place of `RATES`.
    one_rate: float | None = None
    rules: tuple[str, ...] = tuple(RULES)
    seeds: tuple[int, ...] = SEEDS


SITUATIONS = {
    "equal": Situation(),
    "slow": Situation(slower=SLOWER, steps=150),
    "gigabit": Situation(
        rate="1gbit", hidden=(768, 768), steps=160, rate_times=0.075, seeds=SEEDS[:1]
    ),
    "slow-alike": Situation(
        slower=SLOWER, steps=150, one_rate=0.005, rules=SERVED, seeds=SEEDS[:2]
    ),
}


@dataclass(frozen=True)
class Training:
    """One rule in one situation; lists have one element for each test."""

    situation: str
    rule: str
    seed: int
    learning_rate: float
    seconds: list[float]
    megabytes: list[float]
    losses: list[float]
    accuracies: list[float]

    def reached(self, accuracy: float) -> tuple[float, float] | None:
        """After how many seconds and megabytes a test first found this accuracy."""
        points = zip(self.seconds, self.megabytes, self.accuracies, strict=True)
        return next(((s, mb) for s, mb, found in points if found >= accuracy), None)


@dataclass
class Watched:
    """What one worker has seen: when it had sent how many bytes; the first one, also its tests."""

    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    tests: list[tuple[float, float, float]] = field(default_factory=list)


def rank_main(hosts: list[str], situation: Situation, rates: dict[str, float]) -> list[Watched]:
    """Trains by each rule with each seed; the last rank serves those that have servers."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with gradring.init(stall_timeout=TIMEOUT_S) as everybody, contextlib.ExitStack() as stack:
        port = everybody.broadcast(np.array(free_ports(1)))[0]
        workers = None
        if everybody.rank != SERVER:
            meeting = f"{hosts[0]}:{port}"
            joined = gradring.init(rank=everybody.rank, world_size=WORKERS, rendezvous=meeting)
            workers = stack.enter_context(joined)
        found = []
        for rule, rate in rates.items():
            for seed in _seeds(rule, situation):
                with _strategy(everybody, workers, hosts, RULES[rule]) as strategy:
                    everybody.barrier()
                    if strategy is not None:
                        found.append(_train(strategy, everybody.rank, situation, seed, rate))
                everybody.barrier()
    return found


def _seeds(rule: str, situation: Situation) -> tuple[int, ...]:
    """What servers do depends on which gradient comes first; the other rules do not on chance."""
    return situation.seeds if rule in SERVED else situation.seeds[:1]


@contextlib.contextmanager
def _strategy(everybody: Any, workers: Any, hosts: list[str], rule: updates.Rule) -> Iterator[Any]:
    """The strategy of a worker. The server has none, and serves until the workers have left."""
    from gradring.tensorflow import CustomCollectiveStrategy

    if not isinstance(rule, updates.ParameterServer):
        yield (
            None if workers is None else CustomCollectiveStrategy(communicator=workers, update=rule)
        )
        return
    of_server = hosts[SERVER % len(hosts)]
    port = everybody.broadcast(np.array(free_ports(1)), root=SERVER)[0]
    addresses = [f"{of_server}:{port}"]
    if everybody.rank == SERVER:
        with serving(rule, addresses[0], WORKERS):
            yield None
        return
    with served_strategy(rule, everybody.rank, WORKERS, addresses) as strategy:
        yield strategy


@contextlib.contextmanager
def serving(rule: updates.ParameterServer, address: str, workers: int) -> Iterator[None]:
    """The one server of these workers, until they have left."""
    from gradring.tensorflow.cluster.serving import make_server

    server = make_server(rule, [address], 0, workers)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield
        thread.join()
    finally:
        server.close()


@contextlib.contextmanager
def served_strategy(
    rule: updates.Rule, worker: int, workers: int, servers: list[str]
) -> Iterator[Any]:
    """The strategy of a worker of servers at these addresses, until it leaves them."""
    from gradring.tensorflow import CustomCollectiveStrategy

    others = [f"{LOOPBACK}:{1 + it}" for it in range(workers)]
    kept = {name: os.environ.pop(name) for name in OF_GROUP}
    os.environ["TF_CONFIG"] = tf_config_of(others, worker, servers)
    try:
        strategy = CustomCollectiveStrategy(update=rule)
    finally:
        del os.environ["TF_CONFIG"]
        os.environ.update(kept)
    yield strategy
    strategy.leave()


def _train(strategy: Any, rank: int, situation: Situation, seed: int, rate: float) -> Watched:
    import keras
    import tensorflow as tf

    from gradring.tools.demo.train import GLOBAL_BATCH, TRAINING_IMAGES, load_data

    (images, labels), test = load_data()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        hidden = [keras.layers.Dense(width, "tanh") for width in situation.hidden]
        layers = [keras.layers.Input((8, 8, 1)), keras.layers.Flatten(), *hidden]
        model = keras.Sequential([*layers, keras.layers.Dense(10)])
        optimizer = keras.optimizers.Adam(rate)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function(input_signature=[tf.TensorSpec([GLOBAL_BATCH // WORKERS], tf.int64)])  # type: ignore[untyped-decorator]
    def step(batch: Any) -> None:
        strategy.run(replica_step, args=(batch,))

    def replica_step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = model(tf.gather(images, batch), training=True)
            loss = loss_of(tf.gather(labels, batch), outputs) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    rule = strategy.update_rule
    is_served = isinstance(rule, updates.ParameterServer)
    slower = situation.slower if rank == SLOW else 1.0
    # In the time of the slowest, others do as many more steps as the rule lets them.
    steps = situation.steps
    if is_served:
        ahead = rule.staleness if not rule.backup else None
        most = int(steps * situation.slower / slower)
        steps = most if ahead is None else min(most, steps + ahead)
    draw = np.random.default_rng(seed)
    epochs = -(-steps * GLOBAL_BATCH // TRAINING_IMAGES)
    drawn = np.concatenate([draw.permutation(TRAINING_IMAGES) for _ in range(epochs)])
    batches = drawn[: steps * GLOBAL_BATCH].reshape(steps, GLOBAL_BATCH)[:, rank::WORKERS]
    # Inside a round of local steps, a worker has what nobody else has.
    every = rule.every if isinstance(rule, updates.LocalSGD) else TEST_EVERY

    def sent() -> int:
        if not is_served:
            return int(strategy.communicator.stats()["bytes_sent"])
        counted = strategy.update_stats()
        # What a worker receives, a server has sent.
        return int(counted["bytes_sent"] + counted["bytes_received"])

    watched, kept = Watched(), []
    before = None
    step.get_concrete_function()
    for number, batch in enumerate(batches, 1):
        time.sleep(STEP_S * slower)
        step(tf.constant(batch))
        if before is None:
            # The first step still makes connections.
            before = sent()
        watched.seconds.append(time.monotonic())
        watched.bytes.append(sent() - before)
        if rank == 0 and number % every == 0:
            kept.append((watched.seconds[-1], [np.array(it) for it in model.variables]))
    if is_served:
        strategy.leave()
    for second, weights in kept:
        model.set_weights(weights)
        watched.tests.append((second, *_tested(model, *test)))
    return watched


def _tested(model: Any, images: Any, labels: Any) -> tuple[float, float]:
    """Mean loss and accuracy."""
    logits = np.asarray(model(images), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    of_label = np.take_along_axis(logits, labels[:, np.newaxis], axis=-1)[:, 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - of_label
    return float(losses.mean()), float(np.mean(logits.argmax(axis=-1) == labels))


def _training(name: str, rule: str, seed: int, rate: float, workers: list[Watched]) -> Training:
    """Adds up what all workers had sent at each test of the first one."""
    begun = workers[0].seconds[0]
    times = np.array([second for second, _, _ in workers[0].tests])
    sent = sum(np.interp(times, it.seconds, it.bytes) for it in workers)
    return Training(
        situation=name,
        rule=rule,
        seed=seed,
        learning_rate=rate,
        seconds=[round(float(it) - begun, 3) for it in times],
        megabytes=[round(float(it) / 1e6, 3) for it in sent],
        losses=[round(it, 4) for _, it, _ in workers[0].tests],
        accuracies=[round(it, 4) for _, _, it in workers[0].tests],
    )


def measure(name: str, situation: Situation, rates: dict[str, float]) -> list[Training]:
    """All trainings in one situation."""
    with network(hosts=WORKERS + 1 if situation.rate else 1, rate=situation.rate) as hosts:
        addresses = [host.address for host in hosts] or [LOOPBACK]
        given = (addresses, situation, rates)
        ranks = run_ranks(rank_main, WORKERS + 1, *given, hosts=hosts, timeout=TIMEOUT_S)
    tasks = [(rule, seed) for rule in rates for seed in _seeds(rule, situation)]
    return [
        _training(name, rule, seed, rates[rule], list(workers))
        for (rule, seed), *workers in zip(tasks, *ranks[:SERVER], strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = Parser(__doc__)
    parser.add_argument("record", type=Path, metavar="FILE.json")
    parser.add_argument("--situations", default=",".join(SITUATIONS))
    parser.add_argument("--rules")
    parser.add_argument("--seeds", type=int, help="trainings of each rule")
    parser.add_argument("--rate-times", type=float, default=1.0, help="of all learning rates")
    parser.add_argument("--steps", type=int, help="of each training; for tests")
    options = parser.parse(arguments)
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    for name in options.situations.split(","):
        situation = SITUATIONS[name]
        if options.steps:
            situation = replace(situation, steps=options.steps)
        if options.seeds:
            situation = replace(situation, seeds=SEEDS[: options.seeds])
        names = options.rules.split(",") if options.rules else situation.rules
        times = situation.rate_times * options.rate_times
        rates = {rule: (situation.one_rate or RATES[rule]) * times for rule in names}
        found = measure(name, situation, rates)
        for rule in rates:
            print(_line([it for it in found if it.rule == rule]), flush=True)
        record[name] = {
            "date": resources.date(),
            "machine": resources.machine(),
            "trainings": [asdict(it) for it in found],
        }
        options.record.write_text(json.dumps(record) + "\n")


def _line(trainings: list[Training]) -> str:
    first = trainings[0]
    reached = [it.reached(GOAL) for it in trainings]
    ends = statistics.mean(it.accuracies[-1] for it in trainings)
    best = min(max(it.accuracies) for it in trainings)
    words = (
        "not reached"
        if None in reached
        else "{:6.2f} s {:8.2f} MB".format(
            *(statistics.mean(it) for it in zip(*filter(None, reached), strict=True))
        )
    )
    return (
        f"{first.situation:8} {first.rule:18} {first.learning_rate:6} {GOAL} after {words}, "
        f"{trainings[0].seconds[-1]:6.2f} s in all, accuracy {ends:.4f}, least best {best:.4f}"
    )


if __name__ == "__main__":
    main()
