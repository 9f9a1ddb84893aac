"""The ways of training: each gets a model that is ready on this rank, and trains it on its data."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from real_models.real_model import RealModel


@dataclass(frozen=True)
class Way:
    """One way of training.

    Attributes:
        train: Trains; returns a loss for each step, or for all.
        strategy: Whether model and optimizers are made in the scope of the strategy; otherwise the
            ranks begin with equal weights and reduce by themselves.
        gradients: How a step comes by its gradients; the one process does it in the same way.
        options: Arguments of the optimizer.
        rounds_to: The type to which TensorFlow may round on its way, if not the model's.
        by_parts: Whether the loss is no mean over samples, so that each part of a batch has one.
    """

    train: Callable[[Any], list[float]]
    strategy: bool = True
    gradients: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rounds_to: str | None = None
    by_parts: bool = False


@dataclass
class Setup:
    """What a way gets."""

    real: RealModel
    way: Way
    model: Any
    optimizers: list[Any]
    comm: Any
    strategy: Any
    bucket_bytes: int
    x: Any
    y: Any

    def batches(self) -> Any:
        """The data in batches of the global size."""
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((self.x, self.y)).batch(self.real.batch)

    def own_batches(self) -> Any:
        """The part of each batch that is this rank's."""
        rows = self.real.batch // self.comm.world_size
        mine = slice(self.comm.rank * rows, (self.comm.rank + 1) * rows)
        return self.batches().map(
            lambda *batch: _mapped(lambda part: part[mine], batch), deterministic=True
        )

    def stacked(self) -> Any:
        """The same, with all steps in one tensor."""
        return next(iter(self.own_batches().batch(10_000)))


def plain(loss_of: Callable[[], Any], weights: Any, scale: Callable[[Any], Any]) -> Any:
    """A tape around the loss; returns the loss and the gradients of what `scale` makes of it."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of()
        minimised = scale(loss)
    return loss, tape.gradient(minimised, weights)


def recomputed(loss_of: Callable[[], Any], weights: Any, scale: Callable[[Any], Any]) -> Any:
    """The forward pass runs again for the backward pass."""
    import tensorflow as tf

    return plain(lambda: tf.recompute_grad(loss_of)(), weights, scale)


def penalised(loss_of: Callable[[], Any], weights: Any, scale: Callable[[Any], Any]) -> Any:
    """A tape in a tape: the norm of the gradient is part of the loss."""
    import tensorflow as tf

    def whole() -> Any:
        loss, gradients = plain(loss_of, weights, lambda loss: loss)
        return loss + 0.01 * tf.add_n([tf.reduce_sum(g * g) for g in gradients])

    return plain(whole, weights, scale)


def persistent(loss_of: Callable[[], Any], weights: Any, scale: Callable[[Any], Any]) -> Any:
    """One tape gives the gradients of two losses."""
    import tensorflow as tf

    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of()
        first, second = scale(0.75 * loss), scale(0.25 * loss)
    both = zip(tape.gradient(first, weights), tape.gradient(second, weights), strict=True)
    return loss, [a + b for a, b in both]


def compiled(loss_of: Callable[[], Any], weights: Any, scale: Callable[[Any], Any]) -> Any:
    """XLA compiles the forward pass, and with it the backward pass."""
    import tensorflow as tf

    return plain(tf.function(loss_of, jit_compile=True), weights, scale)


def fit(setup: Setup, **options: Any) -> list[float]:
    """`model.fit`."""
    with setup.strategy.scope():
        optimizer, *others = setup.optimizers
        setup.model.compile(
            setup.optimizers if others else optimizer, loss=setup.real.compiled_loss(), **options
        )
    history = setup.model.fit(setup.batches(), verbose=0).history
    return [float(loss) for loss in history["loss"]]


def replica_step(setup: Setup, batch: Any) -> Any:
    """What each replica does with its part of a batch, in a loop under the strategy."""
    replicas = setup.strategy.num_replicas_in_sync
    losses = []
    for loss, gradients, weights, optimizer in _parts(setup, batch, 1 / replicas):
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        losses.append(loss)
    return sum(losses)


def strategy_step(setup: Setup, batch: Any) -> Any:
    """A step under the strategy; returns the mean of the replicas' losses."""
    losses = setup.strategy.run(functools.partial(replica_step, setup), (batch,))
    return setup.strategy.reduce("MEAN", losses, axis=None)


def loop(setup: Setup, **options: Any) -> list[float]:
    """The usual custom training loop; the options are those of `tf.function`."""
    import tensorflow as tf

    step = tf.function(functools.partial(strategy_step, setup), **options)
    return [float(step(batch)) for batch in _distributed(setup)]


def loop_in_function(setup: Setup) -> list[float]:
    """The loop over the dataset is inside the function, too."""
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]
    def epoch(batches: Any) -> Any:
        total = _nothing()
        for batch in batches:
            total += _as_float64(strategy_step(setup, batch))
        return total

    return [float(epoch(_distributed(setup)))]


def loop_with_cond(setup: Setup) -> list[float]:
    """A condition decides whether a batch is used; it holds for all but one, which comes again."""
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any, use: Any) -> Any:
        return tf.cond(use, lambda: _as_float64(strategy_step(setup, batch)), _nothing)

    first, *others = _distributed(setup)
    skipped = step(first, tf.constant(False))
    assert float(skipped) == 0.0
    return [float(step(batch, tf.constant(True))) for batch in [first, *others]]


def loop_with_while(setup: Setup) -> list[float]:
    """`tf.while_loop` around the step; the batches are slices of one tensor."""
    import tensorflow as tf

    batches = setup.stacked()

    def body(index: Any, total: Any) -> Any:
        batch = _mapped(lambda part: part[index], batches)
        return index + 1, total + _as_float64(strategy_step(setup, batch))

    @tf.function  # type: ignore[untyped-decorator]
    def steps() -> Any:
        count = len(setup.y) // setup.real.batch
        return tf.while_loop(lambda index, _: index < count, body, (0, _nothing()))[1]

    return [float(steps())]


def loop_with_map(setup: Setup) -> list[float]:
    """`tf.map_fn` around the step."""
    import tensorflow as tf

    batches = setup.stacked()

    @tf.function  # type: ignore[untyped-decorator]
    def steps() -> Any:
        return tf.map_fn(
            lambda batch: _as_float64(strategy_step(setup, batch)),
            batches,
            fn_output_signature=tf.float64,
        )

    return [float(loss) for loss in steps()]


PASSES = (
    "arithmetic_optimization",
    "auto_parallel",
    "constant_folding",
    "debug_stripper",
    "dependency_optimization",
    "disable_meta_optimizer",
    "disable_model_pruning",
    "function_optimization",
    "implementation_selector",
    "layout_optimizer",
    "loop_optimization",
    "pin_to_host_optimization",
    "remapping",
    "scoped_allocator_optimization",
    "shape_optimization",
    "use_plugin_optimizers",
)
"""Passes of TensorFlow's graph optimizer that change no precision."""


def loop_with_passes(setup: Setup, on: bool) -> list[float]:
    """Each batch with another pass of the graph optimizer switched on, or off."""
    import tensorflow as tf

    losses = []
    for batch, name in zip(_distributed(setup), itertools.cycle(PASSES), strict=False):
        with _experimental_options({name: on}):
            step = tf.function(functools.partial(strategy_step, setup))
            try:
                losses.append(float(step(batch)))
            except Exception as error:
                raise RuntimeError(f"with {name}={on}") from error
    return losses


def loop_in_bfloat16(setup: Setup) -> list[float]:
    """oneDNN's automatic mixed precision."""
    with _experimental_options({"auto_mixed_precision_onednn_bfloat16": True}):
        return loop(setup)


@contextlib.contextmanager
def _experimental_options(options: dict[str, Any]) -> Iterator[None]:
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(options)
    try:
        yield
    finally:
        usual = {name: not value for name, value in options.items()} | before
        tf.config.optimizer.set_experimental_options(usual)


def reducer(setup: Setup) -> list[float]:
    """A loop without a strategy, with `GradientReducer`."""
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    reduce_gradients = GradientReducer(bucket_bytes=setup.bucket_bytes, communicator=setup.comm)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any) -> Any:
        losses = []
        for loss, gradients, weights, optimizer in _parts(setup, batch, 1.0):
            reduced = reduce_gradients(gradients, weights)
            optimizer.apply_gradients(zip(reduced, weights, strict=True))
            losses.append(loss)
        return sum(losses)

    return [float(step(batch)) for batch in setup.own_batches()]


def horovod_tape(setup: Setup) -> list[float]:
    """A loop with Horovod's tape."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        losses = []
        parts = setup.real.parts_of(setup.model, x, y)
        for (loss_of, weights), optimizer in zip(parts, setup.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = loss_of()
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            losses.append(loss)
        return sum(losses)

    hvd.init()
    losses = [float(step(x, y)) for x, y in setup.own_batches()]
    hvd.shutdown()
    return losses


def horovod_fit(setup: Setup) -> list[float]:
    """Horovod's optimizer and callbacks in `fit`."""
    import gradring.horovod.tensorflow.keras as hvd

    hvd.init()
    (optimizer,) = setup.optimizers
    setup.model.compile(hvd.DistributedOptimizer(optimizer), setup.real.compiled_loss())
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = setup.model.fit(setup.own_batches(), callbacks=callbacks, verbose=0).history
    hvd.shutdown()
    return [float(loss) for loss in history["loss"]]


def _parts(setup: Setup, batch: Any, share: float) -> Iterable[tuple[Any, Any, Any, Any]]:
    """Loss, gradients of its share, variables and optimizer of each part, one after the other."""
    x, y = batch
    gradients_of = setup.way.gradients or plain
    parts = setup.real.parts_of(setup.model, x, y)
    for (loss_of, weights), optimizer in zip(parts, setup.optimizers, strict=True):
        scale = functools.partial(scaled, optimizer, share)
        loss, gradients = gradients_of(loss_of, weights, scale)
        yield loss, gradients, weights, optimizer


def scaled(optimizer: Any, share: float, loss: Any) -> Any:
    """Of what the gradients are: a share of the loss, as large as its optimizer wants it."""
    return optimizer.scale_loss(loss * share)


def _distributed(setup: Setup) -> Any:
    return setup.strategy.experimental_distribute_dataset(setup.batches())


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(function, nest)


def _as_float64(value: Any) -> Any:
    import tensorflow as tf

    return tf.cast(value, tf.float64)


def _nothing() -> Any:
    import tensorflow as tf

    return tf.zeros([], tf.float64)


WAYS: dict[str, Way] = {
    "fit": Way(fit),
    "fit, steps_per_execution=4": Way(functools.partial(fit, steps_per_execution=4)),
    "fit, run_eagerly": Way(functools.partial(fit, run_eagerly=True)),
    'fit, jit_compile="auto"': Way(functools.partial(fit, jit_compile="auto")),
    "fit, gradients accumulated": Way(fit, options={"gradient_accumulation_steps": 4}),
    "fit, gradients clipped": Way(fit, options={"global_clipnorm": 0.5}),
    "loop": Way(loop),
    "loop, gradients accumulated": Way(loop, options={"gradient_accumulation_steps": 4}),
    "loop, reduce_retracing": Way(functools.partial(loop, reduce_retracing=True)),
    "loop in a function": Way(loop_in_function),
    "loop with tf.cond": Way(loop_with_cond),
    "loop with tf.while_loop": Way(loop_with_while),
    "loop with tf.map_fn": Way(loop_with_map),
    "loop, tf.recompute_grad": Way(loop, gradients=recomputed),
    "loop, tape in a tape": Way(loop, gradients=penalised, by_parts=True),
    "loop, persistent tape": Way(loop, gradients=persistent),
    "loop, forward pass by XLA": Way(loop, gradients=compiled),
    "loop, every pass of Grappler on": Way(functools.partial(loop_with_passes, on=True)),
    "loop, every pass of Grappler off": Way(functools.partial(loop_with_passes, on=False)),
    "loop, auto mixed precision": Way(loop_in_bfloat16, rounds_to="bfloat16"),
    "GradientReducer": Way(reducer, strategy=False),
    "GradientReducer, tf.recompute_grad": Way(reducer, strategy=False, gradients=recomputed),
    "Horovod's tape": Way(horovod_tape, strategy=False),
    "Horovod's fit": Way(horovod_fit, strategy=False),
}
