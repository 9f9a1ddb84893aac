"""Time of a step of real models: `python -m benches.model_steps`.

Two processes train the same model with the same program in up to five ways, interleaved round by
round:

* *alone*: one process without a strategy, while the other one sleeps;
* *apart*: both at the same time, each for itself: what two ranks could reach at best here;
* *one rank*: one process under `CustomCollectiveStrategy` in a group of its own;
* *gradring*: both under `CustomCollectiveStrategy`;
* *MWMS*: both under `MultiWorkerMirroredStrategy`, with its ring; in a custom loop only, because
  `fit` of Keras 3 fails under it.

A process has the same batch in all of them. A step ends when its loss is known, and where both take
part it is that of the slower one. *adds* is what gradring adds to *apart*, of which a rank *waits*
for the other one, *moves* bytes, and stands still (*exposed*); `Communicator.stats` defines these.
*collectives* are those of a step.

Afterwards all variables of both ranks must be equal under gradring.

`--threads default` leaves TensorFlow its own number of threads, as many as there are cores for each
process; `--threads 1` gives each process one of each kind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.harness import Parser, print_surroundings, write
from gradring.testing import run_ranks

RANKS = 2
CLASSES = 10
WARM_UP_STEPS = 3
TIMEOUT_S = 3600.0
WAYS = ("alone", "apart", "one rank", "gradring", "MWMS")
#: Those in which rank 1 sleeps.
OF_ONE = ("alone", "one rank")
PROGRAMS = ("loop", "fit")
THREADS = ("default", "1")
#: Keys of `Communicator.stats`.
COUNTED = ("count", "waiting_s", "moving_s", "exposed_s")


@dataclass(frozen=True)
class Kind:
    """A model, of the words or the images of one side that it takes."""

    build: Callable[[Any], Any]
    batch: int
    side: int = 0
    words: int = 0


def _application(name: str) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        options = {"weights": None, "classes": CLASSES, "classifier_activation": None}
        shape = (KINDS[name].side, KINDS[name].side, 3)
        return getattr(keras.applications, name)(input_shape=shape, **options)

    return build


def _mlp(keras: Any) -> Any:
    hidden = [keras.layers.Dense(1700, activation="relu") for _ in range(4)]
    layers = [keras.layers.Input((16, 16, 3)), keras.layers.Flatten(), *hidden]
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])


def _lstm(keras: Any) -> Any:
    layers = keras.layers
    inputs = [layers.Input((64,), dtype="int32"), layers.Embedding(5000, 128)]
    return keras.Sequential([*inputs, layers.LSTM(256), layers.Dense(CLASSES)])


def _embedding(keras: Any) -> Any:
    layers = keras.layers
    inputs = [layers.Input((32,), dtype="int32"), layers.Embedding(100_000, 64)]
    pooled = [layers.GlobalAveragePooling1D(), layers.Dense(64, activation="relu")]
    return keras.Sequential([*inputs, *pooled, layers.Dense(CLASSES)])


def _bert(keras: Any) -> Any:
    """Two layers of 128, as BERT-tiny, without the second kind of token."""
    layers = keras.layers
    inputs = layers.Input((128,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
    x = layers.Embedding(30522, 128)(inputs) + layers.Embedding(128, 128)(places)
    x = layers.LayerNormalization()(x)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 64)(x, x))
        wide = layers.Dense(512, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(128)(wide))
    return keras.Model(inputs, layers.Dense(CLASSES)(x[:, 0]))


KINDS = {
    "ResNet50": Kind(_application("ResNet50"), 8, side=32),
    "MobileNetV2": Kind(_application("MobileNetV2"), 16, side=64),
    "MobileNetV3Small": Kind(_application("MobileNetV3Small"), 16, side=64),
    "EfficientNetB0": Kind(_application("EfficientNetB0"), 8, side=64),
    "DenseNet121": Kind(_application("DenseNet121"), 8, side=32),
    "BERT-tiny": Kind(_bert, 8, words=30522),
    "LSTM": Kind(_lstm, 32, words=5000),
    "MLP": Kind(_mlp, 128, side=16),
    "embedding": Kind(_embedding, 256, words=100_000),
}


@dataclass(frozen=True)
class Row:
    """One model and program: milliseconds of a step by way, and of gradring what it consists of."""

    model: str
    parameters: int
    program: str
    threads: str
    steps: int
    p50_ms: dict[str, float]
    p90_ms: dict[str, float]
    collectives: float
    waits_ms: float
    moves_ms: float
    exposed_ms: float

    @property
    def adds_ms(self) -> float:
        """What gradring adds to two processes that are not connected."""
        return self.p50_ms["gradring"] - self.p50_ms["apart"]

    def cells(self) -> Iterator[str]:
        """Of a line of the table."""
        yield from (self.model, f"{self.parameters / 1e6:.1f} M", self.program, self.threads)
        for way in WAYS:
            known = way in self.p50_ms
            yield f"{self.p50_ms[way]:.0f} / {self.p90_ms[way]:.0f}" if known else "-"
        yield f"{self.collectives:.1f}"
        yield f"{self.adds_ms:+.1f} ({self.p50_ms['gradring'] / self.p50_ms['apart'] - 1:+.0%})"
        yield f"{self.waits_ms:.1f} / {self.moves_ms:.1f} / {self.exposed_ms:.1f}"


def recorded_steps(path: Path) -> list[Row]:
    """What `--json` has written.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is something else.
    """
    try:
        return [Row(**row) for row in json.loads(path.read_text())]
    except TypeError:
        raise ValueError(f"{path} has no rows of python -m benches.model_steps") from None


HEAD = (
    *("model", "parameters", "program", "threads", *WAYS),
    *("collectives", "adds", "waits / moves / exposed"),
)


class Training:
    """One model and its optimizer under one strategy; the program is the same for all."""

    def __init__(self, comm: Any, strategy: Any, name: str, program: str) -> None:
        import keras

        self.comm = comm

        self.strategy, self.kind, self.program = strategy, KINDS[name], program
        keras.utils.set_random_seed(1)
        with strategy.scope():
            self.model = self.kind.build(keras)
            self.optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
            self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.optimizer.build(self.model.trainable_variables)
        self.rows = _samples(self.kind, comm.rank)
        if program == "fit":
            self.model.compile(self.optimizer, self.loss_of, jit_compile=False)
        else:
            self._step = self._function()

    def spent(self, steps: int) -> NDArray[Any]:
        """In each step, seconds and what the group has counted: `[steps, 1 + len(COUNTED)]`."""
        ends = self._fit(steps) if self.program == "fit" else self._loop(steps)
        return np.diff(ends, axis=0)

    def _now(self) -> list[float]:
        stats = self.comm.stats()
        return [time.perf_counter(), *(float(stats[key]) for key in COUNTED)]

    def _function(self) -> Any:
        import tensorflow as tf

        replicas = self.strategy.num_replicas_in_sync

        def replica_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self.model(x, training=True)) / replicas
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> Any:
            per_replica = self.strategy.run(replica_step, args=(x, y))
            return self.strategy.reduce("SUM", per_replica, axis=None)

        x, y = map(tf.constant, self.rows)
        return lambda: float(step(x, y))

    def _loop(self, steps: int) -> list[list[float]]:
        ends = [self._now()]
        for _ in range(steps):
            self._step()
            ends.append(self._now())
        return ends

    def _fit(self, steps: int) -> list[list[float]]:
        """One step more, with which the dataset and the iterator begin."""
        import keras
        import tensorflow as tf

        ends: list[list[float]] = []
        clock = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, **__: ends.append(self._now())
        )
        # A dataset is of the batches of all replicas.
        whole = [np.concatenate([part] * self.strategy.num_replicas_in_sync) for part in self.rows]
        data = tf.data.Dataset.from_tensor_slices(tuple(whole)).repeat(steps + 1)
        data = data.batch(len(whole[0]))  # as most programs have it: the size is not known
        self.model.fit(data, verbose=0, callbacks=[clock])
        return ends


def _samples(kind: Kind, rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    draw = np.random.default_rng(rank)
    labels = draw.integers(0, CLASSES, kind.batch)
    if not kind.words:
        shape = (kind.batch, kind.side, kind.side, 3)
        return draw.normal(size=shape).astype(np.float32), labels
    lengths = {"BERT-tiny": 128, "LSTM": 64, "embedding": 32}
    (name,) = [name for name, each in KINDS.items() if each is kind]
    return draw.integers(0, kind.words, (kind.batch, lengths[name])).astype(np.int32), labels


def rank_main(name: str, program: str, threads: str, rounds: int, steps: int) -> Any:
    """Trains in all ways in turn; what `Row` is made of."""
    import gradring
    from gradring.tools.bench.systems.tensorflow import configure

    with gradring.init() as comm:
        configure(comm)  # with TensorFlow's own number of threads
        import tensorflow as tf

        if threads != "default":
            tf.config.threading.set_inter_op_parallelism_threads(int(threads))
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        trainings = {
            way: Training(comm, strategy, name, program)
            for way, strategy in _strategies(comm, program).items()
        }
        spent: dict[str, list[NDArray[Any]]] = {way: [] for way in trainings}
        for round in range(-1, rounds):
            for way, training in trainings.items():
                comm.barrier()
                took = _turn(comm, way, training, WARM_UP_STEPS if round < 0 else steps)
                spent[way] += [took] if round >= 0 else []
        together = {way: np.concatenate(turns) for way, turns in spent.items()}
        slower = {w: comm.all_reduce(took[:, 0].copy(), op="max") for w, took in together.items()}
        _check(comm, trainings["gradring"])
        comm.barrier()
        parameters = trainings["gradring"].model.count_params()
        return parameters, slower, together["gradring"][:, 1:].mean(axis=0)


def _strategies(comm: Any, program: str) -> dict[str, Any]:
    import tensorflow as tf

    from gradring import Communicator
    from gradring.tensorflow import CustomCollectiveStrategy

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    none = tf.distribute.get_strategy()
    strategies = {"alone": none, "apart": none}
    if program == "loop":
        # Wants to be the first, for it starts TensorFlow's server.
        mirrored = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    group = Communicator(rank=0, world_size=1)
    strategies["one rank"] = CustomCollectiveStrategy(communicator=group)
    strategies["gradring"] = CustomCollectiveStrategy(communicator=comm)
    return strategies | ({"MWMS": mirrored} if program == "loop" else {})


def _turn(comm: Any, way: str, training: Training, steps: int) -> NDArray[Any]:
    if way in OF_ONE and comm.rank:
        return np.zeros((steps, 1 + len(COUNTED)))
    return training.spent(steps)


def _check(comm: Any, training: Training) -> None:
    """All ranks have the same variables, moving statistics too."""
    own = np.concatenate([np.ravel(weight) for weight in training.model.get_weights()])
    first = own.copy()
    comm.broadcast(first)
    assert np.array_equal(own, first), "the ranks' variables differ"


def measure(name: str, program: str, threads: str, rounds: int, steps: int) -> Row:
    """One row, from two fresh processes."""
    arguments = (name, program, threads, rounds, steps)
    parameters, times, spent = run_ranks(rank_main, RANKS, *arguments, timeout=TIMEOUT_S)[0]
    ms = {way: (1e3 * np.quantile(took, (0.5, 0.9))).round(3) for way, took in times.items()}
    return Row(
        *(name, int(parameters), program, threads, rounds * steps),
        {way: float(found[0]) for way, found in ms.items()},
        {way: float(found[1]) for way, found in ms.items()},
        *(spent * (1, 1e3, 1e3, 1e3)).round(3).tolist(),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a table in Markdown."""
    parser = Parser(__doc__)
    parser.add_argument("--models", default=",".join(KINDS), help="default %(default)s")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="default %(default)s")
    parser.add_argument("--threads", default=",".join(THREADS), help="default %(default)s")
    parser.add_rounds(10)
    parser.add_argument("--steps", type=int, default=5, help="of each way in each round")
    parser.add_record()
    options = parser.parse(arguments)
    if unknown := set(options.models.split(",")) - set(KINDS):
        parser.error(f"no model {', '.join(unknown)}; known: {', '.join(KINDS)}")
    print_surroundings("tensorflow")
    print("# ms of a step, p50 / p90")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    rows = []
    for name in options.models.split(","):
        for program in options.programs.split(","):
            for threads in options.threads.split(","):
                rows.append(measure(name, program, threads, options.rounds, options.steps))
                print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
                write(options.json, rows)


if __name__ == "__main__":
    main()
