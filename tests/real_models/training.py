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
from real_models.grid import Cell
from real_models.real_model import RealModel
from real_models.ways import WAYS, Setup, Way

FLOAT64_TOLERANCE = 1e-10
ROUNDINGS = 20
"""Elsewhere: so many times what one rounding of each weight, before the first step, becomes."""
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
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, broadcast_variables

    began = time.monotonic()
    real, way = MODELS[cell.model], WAYS[cell.way]
    keras.backend.clear_session()
    gc.collect()
    keras.config.set_floatx("float64" if cell.policy == "float64" else "float32")
    keras.config.set_dtype_policy(cell.policy)
    # Ranks begin differently: only rank 0's initial values may count.
    keras.utils.set_random_seed(1 + comm.rank)
    x, y = data(cell, real)
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
    trained = {
        "parameters": model.count_params(),
        "bits": hashlib.sha256(b"".join(w.tobytes() for w in after)).hexdigest()[:16],
        "loss": losses[-1],
        "moved": distance(after, [before[i] for i in which]),
    }
    del setup, model, optimizers
    if comm.rank == 0:
        alone = Alone(real, way, *made(cell, real, way))
        expected = alone.train(before, x, y)
        trained["distance"] = distance(after, [expected[i] for i in which])
        trained["tolerance"] = FLOAT64_TOLERANCE
        if cell.policy != "float64":
            other = alone.train(disturbed(before, precision(cell, way)), x, y)
            trained["tolerance"] = ROUNDINGS * distance(expected, other)
    comm.barrier()
    trained["seconds"] = round(time.monotonic() - began, 1)
    return Trained(**trained)


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
