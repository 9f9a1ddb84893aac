"""Time of a step of models: `python -m benches.model_steps`.

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

Afterwards all variables of both ranks must be equal under gradring, and in a loop, those of simple
models close to what MWMS has.

Measured are real models, unless `--models` names simple ones: MLPs and a network of convolutions.
A step of the tiny one is nearly all overhead: what a strategy adds to it, it adds to every step.
`--rate 1gbit` puts each process on a simulated host of its own with such a link, as root.

`--threads default` leaves TensorFlow its own number of threads, as many as there are cores for each
process; `--threads 1` gives each process one of each kind.
"""

from __future__ import annotations

import itertools
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.harness import Parser, print_surroundings, write
from gradring.testing import Host, run_ranks
from gradring.tools.bench.measurement import P99_ITERATIONS
from gradring.tools.bench.network import network

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
#: Fields of `resource.getrusage`: seconds of the process and of the kernel for it, page faults.
USED = ("ru_utime", "ru_stime", "ru_minflt")
FIELDS = 1 + len(COUNTED) + len(USED)
#: Parts of `Row.more` that add up to a step.
MORE = ("user_ms", "system_ms", "idle_ms")
#: Between weights of two strategies, which add in different orders.
CLOSE = 1e-3


@dataclass(frozen=True)
class Kind:
    """A model, of the texts of so many words or the images of one side that it takes."""

    build: Callable[[Any], Any]
    batch: int
    side: int = 0
    words: int = 0
    length: int = 0


def _application(name: str) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        options = {"weights": None, "classes": CLASSES, "classifier_activation": None}
        shape = (KINDS[name].side, KINDS[name].side, 3)
        return getattr(keras.applications, name)(input_shape=shape, **options)

    return build


def _mlp(width: int) -> Callable[[Any], Any]:
    def build(keras: Any) -> Any:
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
        layers = [keras.layers.Input((16, 16, 3)), keras.layers.Flatten(), *hidden]
        return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])

    return build


def _cnn(keras: Any) -> Any:
    layers = keras.layers
    first = [layers.Input((28, 28, 3)), layers.Conv2D(32, 3, activation="relu")]
    more = [layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()]
    last = [layers.Dense(64, activation="relu"), layers.Dense(CLASSES)]
    return keras.Sequential([*first, *more, *last])


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


def _unet(keras: Any) -> Any:
    """Three levels, as Keras' example of image segmentation has them, that ends in classes."""
    layers = keras.layers

    def convolved(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    inputs = layers.Input((64, 64, 3))
    skipped, x = [], inputs
    for filters in (32, 64, 128):
        x = convolved(x, filters)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, 256)
    for filters, skip in zip((128, 64, 32), reversed(skipped), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolved(layers.Concatenate()([x, skip]), filters)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def _dlrm(keras: Any) -> Any:
    """Recommendation by dot products of 26 rows with one another, as DLRM, without dense inputs."""
    layers, ops = keras.layers, keras.ops
    inputs = layers.Input((26,), dtype="int32")
    rows = layers.Embedding(100_000, 32)(inputs)
    products = layers.Flatten()(layers.Dot(axes=2)([rows, rows]))
    x = layers.Concatenate()([layers.Flatten()(rows), ops.tanh(products)])
    for width in (512, 256):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


REAL = {
    "ResNet50": Kind(_application("ResNet50"), 8, side=32),
    "MobileNetV2": Kind(_application("MobileNetV2"), 16, side=64),
    "MobileNetV3Small": Kind(_application("MobileNetV3Small"), 16, side=64),
    "EfficientNetB0": Kind(_application("EfficientNetB0"), 8, side=64),
    "DenseNet121": Kind(_application("DenseNet121"), 8, side=32),
    "BERT-tiny": Kind(_bert, 8, words=30522, length=128),
    "LSTM": Kind(_lstm, 32, words=5000, length=64),
    "MLP": Kind(_mlp(1700), 128, side=16),
    "embedding": Kind(_embedding, 256, words=100_000, length=32),
    "U-Net": Kind(_unet, 4, side=64),
    "DLRM": Kind(_dlrm, 512, words=100_000, length=26),
}
SIMPLE = {
    "mlp-tiny": Kind(_mlp(8), 128, side=16),
    "mlp-1m": Kind(_mlp(460), 128, side=16),
    "mlp-25m": Kind(_mlp(2760), 128, side=16),
    "cnn": Kind(_cnn, 128, side=28),
}
KINDS = REAL | SIMPLE


@dataclass(frozen=True)
class Row:
    """One model and program: milliseconds of a step by way, and of gradring what it consists of.

    p99 is of 100 steps or more.
    """

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
    p99_ms: dict[str, float] = field(default_factory=dict)
    #: Means of what gradring adds: user_ms, system_ms, idle_ms, faults.
    more: dict[str, float] = field(default_factory=dict)

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
        yield " / ".join(f"{self.more[part]:+.1f}" for part in MORE)
        yield f"{self.more['faults']:+.0f}"


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
    *("collectives", "adds", "waits / moves / exposed", "more: user / system / idle", "faults"),
)


class Training:
    """One model and its optimizer under one strategy; the program is the same for all."""

    def __init__(self, comm: Any, strategy: Any, kind: Kind, program: str) -> None:
        import keras

        self.comm, self.strategy, self.kind, self.program = comm, strategy, kind, program
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
        """Seconds, `COUNTED` and `USED` in each step, in this order: `[steps, FIELDS]`."""
        ends = self._fit(steps) if self.program == "fit" else self._loop(steps)
        return np.diff(ends, axis=0)

    def _now(self) -> list[float]:
        stats = self.comm.stats()
        used = resource.getrusage(resource.RUSAGE_SELF)
        counted = (float(stats[key]) for key in COUNTED)
        return [time.perf_counter(), *counted, *(getattr(used, name) for name in USED)]

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
    words = draw.integers(0, kind.words, (kind.batch, kind.length))
    return words.astype(np.int32), labels


def rank_main(
    name: str, batch: int | None, program: str, threads: str, rounds: int, steps: int
) -> Any:
    """Trains in all ways in turn; what `Row` is made of."""
    import gradring
    from gradring.tools.bench.systems.tensorflow import configure

    with gradring.init() as comm:
        configure(comm)  # with TensorFlow's own number of threads
        import tensorflow as tf

        if threads != "default":
            tf.config.threading.set_inter_op_parallelism_threads(int(threads))
            tf.config.threading.set_intra_op_parallelism_threads(int(threads))
        kind = replace(KINDS[name], batch=batch or KINDS[name].batch)
        trainings = {
            way: Training(comm, strategy, kind, program)
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
        _check(comm, trainings, is_simple=name in SIMPLE)
        comm.barrier()
        parameters = trainings["gradring"].model.count_params()
        means = {way: took.mean(axis=0) for way, took in together.items()}
        return parameters, slower, means["gradring"], means["gradring"] - means["apart"]


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
        return np.zeros((steps, FIELDS))
    return training.spent(steps)


def _check(comm: Any, trainings: dict[str, Training], *, is_simple: bool) -> None:
    """All ranks have the same variables, moving statistics too; MWMS has much the same."""
    own = {
        way: np.concatenate([np.ravel(weight) for weight in training.model.get_weights()])
        for way, training in trainings.items()
    }
    first = own["gradring"].copy()
    comm.broadcast(first)
    assert np.array_equal(own["gradring"], first), "the ranks' variables differ"
    assert not np.array_equal(first, own["apart"]), "nothing was reduced"
    if is_simple and "MWMS" in own:
        distance = float(np.abs(first - own["MWMS"]).max())
        assert distance < CLOSE, f"gradring's weights differ from MWMS's by {distance:g}"


def measure(name: str, program: str, threads: str, options: Any, hosts: Sequence[Host] = ()) -> Row:
    """One row, from two fresh processes."""
    rounds, steps = options.rounds, options.steps
    arguments = (name, options.batch, program, threads, rounds, steps)
    ranks = run_ranks(rank_main, RANKS, *arguments, timeout=TIMEOUT_S, hosts=hosts)
    parameters, times, spent, _ = ranks[0]
    seconds, *_, user, system, faults = np.mean([more for *_, more in ranks], axis=0).tolist()
    more = {"user_ms": user, "system_ms": system, "idle_ms": seconds - user - system}
    more = {part: round(1e3 * each, 3) for part, each in more.items()}
    more["faults"] = round(faults, 1)
    p50_ms, p90_ms, p99_ms = (
        {way: round(float(1e3 * np.quantile(took, q)), 3) for way, took in times.items()}
        for q in (0.5, 0.9, 0.99)
    )
    count, *milliseconds = (spent[1 : 1 + len(COUNTED)] * (1, 1e3, 1e3, 1e3)).round(3).tolist()
    return Row(
        *(name, int(parameters), program, threads, rounds * steps, p50_ms, p90_ms),
        *(count, *milliseconds, p99_ms if rounds * steps >= P99_ITERATIONS else {}, more),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a table in Markdown."""
    parser = Parser(__doc__)
    parser.add_argument("--models", default=",".join(REAL), help="default %(default)s")
    parser.add_argument("--batch", type=int, help="samples of each process")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="default %(default)s")
    parser.add_argument("--threads", default=",".join(THREADS), help="default %(default)s")
    parser.add_rounds(10)
    parser.add_argument("--steps", type=int, default=5, help="of each way in each round")
    parser.add_rate(None, "each process's link")
    parser.add_record()
    options = parser.parse(arguments)
    if unknown := set(options.models.split(",")) - set(KINDS):
        parser.error(f"no model {', '.join(unknown)}; known: {', '.join(KINDS)}")
    print_surroundings("tensorflow")
    print("# ms of a step, p50 / p90")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    rows = []
    cases = itertools.product(
        *(given.split(",") for given in (options.models, options.programs, options.threads))
    )
    with network(hosts=RANKS if options.rate else 1, rate=options.rate) as hosts:
        for name, program, threads in cases:
            rows.append(measure(name, program, threads, options, hosts))
            print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
            write(options.json, rows)


if __name__ == "__main__":
    main()
