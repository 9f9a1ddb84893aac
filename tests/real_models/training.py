"""One rank's part of a cell: it trains; and rank 0 compares with one process."""

from __future__ import annotations

import gc
import hashlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from real_models.alone import Alone, distance, disturbed
from real_models.catalogue import MODELS
from real_models.grid import UNLIKE_PROCESSORS, Cell
from real_models.real_model import RealModel
from real_models.ways import WAYS, Setup, Way

FLOAT64_TOLERANCE = 1e-10
ROUNDINGS = 20
"""Elsewhere: so many times what one rounding of each weight, before the first step, becomes."""
ROUNDINGS_OF_KERNELS = 100
"""The same where oneDNN is on on one rank only: its kernels add up products in another order than
Eigen's, and which kernels it has depends on the processor. On an AMD EPYC of 2026-11-29, 34 times
was found."""
MOMENTUM = 0.9


@dataclass(frozen=True)
class Trained:
    """What a rank says of a cell.

    Attributes:
        parameters: Of the model.
        bits: A hash of all weights that must be equal on all ranks.
        loss: The last one.
        moved: How far the training has moved a weight; the largest.
        distance: From the weights of one process; the largest. Only rank 0 has it.
        tolerance: What rounding explains of that.
        seconds: What all of it took.
    """

    parameters: int
    bits: str
    loss: float
    moved: float
    distance: float = 0.0
    tolerance: float = 0.0
    seconds: float = 0.0


def train(cell: Cell, comm: Any) -> Trained:
    """Trains a cell's model."""
    began = time.monotonic()
    real, way = MODELS[cell.model], WAYS[cell.way]
    clean_up()
    prepare(cell, comm.rank)
    x, y = data(cell, real)
    before, after, which, trained = train_by_ranks(cell, comm, x, y)
    # The largest models leave no room for two.
    clean_up()
    if comm.rank == 0:
        alone = Alone(real, way, *made(cell, real, way))
        expected = alone.train(before, x, y)
        trained["distance"] = distance(after, [expected[i] for i in which])
        trained["tolerance"] = FLOAT64_TOLERANCE
        if cell.policy != "float64":
            other = alone.train(disturbed(before, precision(cell, way)), x, y)
            roundings = ROUNDINGS_OF_KERNELS if cell.world == UNLIKE_PROCESSORS else ROUNDINGS
            trained["tolerance"] = roundings * distance(expected, other)
    comm.barrier()
    trained["seconds"] = round(time.monotonic() - began, 1)
    return Trained(**trained)


def clean_up() -> None:
    """Frees models that nothing uses any more."""
    import keras

    keras.backend.clear_session()
    gc.collect()


def prepare(cell: Cell, rank: int) -> None:
    """Sets the cell's precision, and seeds: only rank 0's initial values may count."""
    import keras

    keras.config.set_floatx("float64" if cell.policy == "float64" else "float32")
    keras.config.set_dtype_policy(cell.policy)
    keras.utils.set_random_seed(1 + rank)


def train_by_ranks(
    cell: Cell, comm: Any, x: Any, y: Any
) -> tuple[list[Any], list[Any], list[int], dict[str, Any]]:
    """Trains with the other ranks; leaves nothing of the model but arrays.

    Returns:
        All weights before; afterwards those that must be equal on all ranks, and which these are;
        and what is to be said of them.
    """
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, broadcast_variables

    real, way = MODELS[cell.model], WAYS[cell.way]
    strategy = tf.distribute.get_strategy()
    if way.strategy:
        strategy = CustomCollectiveStrategy(communicator=comm, bucket_bytes=cell.bucket_bytes)
    with strategy.scope():
        model, optimizers = made(cell, real, way)
    if not way.strategy:
        broadcast_variables(model.variables)
    before = model.get_weights()
    setup = Setup(real, way, model, optimizers, comm, strategy, cell.bucket_bytes, x, y)
    losses = way.train(setup)
    # Without a strategy, moving statistics are each rank's own.
    kept = model.weights if way.strategy else model.trainable_weights
    which = [i for i, w in enumerate(model.weights) if any(w is k for k in kept)]
    weights = model.get_weights()
    after = [weights[i] for i in which]
    bits = hashlib.sha256()
    for weight in after:
        bits.update(weight.tobytes())
    trained = {
        "parameters": sum(weight.size for weight in weights),
        "bits": bits.hexdigest()[:16],
        "loss": losses[-1],
        "moved": distance(after, [before[i] for i in which]),
    }
    return before, after, which, trained


def made(cell: Cell, real: RealModel, way: Way) -> tuple[Any, list[Any]]:
    """The model, and an optimizer for each of its parts."""
    import keras

    model = real.build()
    optimizers = []
    for _, weights in real.parts_of(model, None, None):
        optimizer = keras.optimizers.SGD(real.learning_rate, momentum=MOMENTUM, **way.options)
        if cell.policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer.build(weights)
        optimizers.append(optimizer)
    return model, optimizers


def data(cell: Cell, real: RealModel) -> tuple[Any, Any]:
    """The samples of all steps, in the precision of the model."""
    import keras
    import tensorflow as tf

    samples = real.samples(np.random.default_rng(0), cell.steps * real.batch)

    def in_precision(array: Any) -> Any:
        return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array

    x, y = tf.nest.map_structure(in_precision, samples)
    return x, y


def precision(cell: Cell, way: Way) -> float:
    """The relative size of a rounding."""
    import ml_dtypes

    name = way.rounds_to or cell.policy.removeprefix("mixed_")
    return float(ml_dtypes.finfo(name).eps)
