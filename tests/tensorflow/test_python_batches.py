"""Batches that Python code makes are named if the ranks make other ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

SAMPLES = 24


class Batches:
    """A generator's batches of eight samples and their labels."""

    def __init__(self, rank: int, kind: str) -> None:
        others = "other order", "constant labels", "strings", "absent part"
        seed = rank if kind in others else 0
        self.kind = kind
        self.rank = rank
        self.order = np.random.default_rng(seed).permutation(SAMPLES)
        self.noise = np.random.default_rng(100 + rank)

    def __call__(self) -> Iterator[Any]:
        order = self.order
        if self.kind == "own share":
            order = np.concatenate([order[self.rank :: 2], order[self.rank :: 2]])
        for begin in range(0, SAMPLES, 8):
            places = order[begin : begin + 8]
            x = np.stack([places, places + 1], 1).astype(np.float32) / SAMPLES
            y = places[:, None].astype(np.float32)
            if self.kind == "noise":
                x += self.noise.normal(size=x.shape).astype(np.float32)
            if self.kind == "constant labels":
                y[:] = 1
            yield (np.char.mod("%d", places), y) if self.kind == "strings" else (x, y)


#: By kind, whether the ranks' batches differ.
KINDS = {
    "one order": False,
    "noise": False,
    "other order": True,
    "own share": True,
    "constant labels": True,
    "strings": True,
    "absent part": True,
}


def dataset_of(batches: Callable[[], Iterator[Any]], kind: str) -> Any:
    import tensorflow as tf

    words = tf.TensorSpec((None,), tf.string), tf.TensorSpec((None, 1))
    numbers = tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(
        batches, output_signature=words if kind == "strings" else numbers
    )
    if kind == "strings":
        data = data.map(lambda x, y: (tf.strings.to_number(tf.stack([x, x], 1)) / SAMPLES, y))
    if kind == "absent part":
        data = data.map(lambda x, y: (x, y, None))
    return data


def fit_each() -> dict[str, list[str]]:
    """What the log says after two epochs with each kind of batches."""
    from gradring.tensorflow import CustomCollectiveStrategy

    found = {}
    records = kept_lines(logging.WARNING)
    with join() as comm:
        for kind in KINDS:
            records.clear()
            strategy = CustomCollectiveStrategy(communicator=comm)
            model = model_in(strategy)
            model.fit(dataset_of(Batches(comm.rank, kind), kind), epochs=2, verbose=0)
            found[kind] = list(records)
    return found


def model_in(strategy: Any) -> Any:
    import tensorflow as tf

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@needs_fit
def test_batches_of_python_that_differ_between_ranks_are_named() -> None:
    first, second = run_ranks(fit_each, 2, timeout=240)
    for kind, differs in KINDS.items():
        told = [line for line in first[kind] if "over a dataset of Python code" in line]
        assert len(told) == differs, (kind, first[kind])
        assert not second[kind], kind
    (line,) = first["other order"]
    assert line.startswith("batch 1 of pass 1 ")


def twice(number: bytes) -> Any:
    return np.array([number, number], np.float32)


def find_each(directory: Path) -> dict[str, Any]:
    """What the log says of other loops and policies, whose ranks have other orders."""
    import tensorflow as tf

    from gradring.errors import ConfigError
    from gradring.tensorflow import CustomCollectiveStrategy

    found: dict[str, Any] = {}
    records = kept_lines(logging.WARNING)

    def said(kind: str) -> None:
        found[kind] = [line for line in records if "over a dataset of Python code" in line]
        records.clear()

    with join() as comm:
        data = dataset_of(Batches(comm.rank, "other order"), "other order")
        for loop in ("evaluate", "predict"):
            model = model_in(CustomCollectiveStrategy(communicator=comm))
            getattr(model, loop)(data, verbose=0)
            said(loop)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        model = model_in(CustomCollectiveStrategy(communicator=comm))
        model.fit(data.with_options(options), verbose=0)
        said("undivided")
        paths = [str(directory / f"{number}.txt") for number in range(2)]
        for number, path in enumerate(paths):
            Path(path).write_text("".join(f"{number}{row}\n" for row in range(8)))
        lines = tf.data.TextLineDataset(paths)
        read = lines.map(lambda line: tf.numpy_function(twice, [line], tf.float32))
        rows = read.map(lambda row: tf.ensure_shape(row, [2]))
        model.fit(rows.map(lambda row: (row, row[:1])).batch(4), verbose=0)
        said("files")
        strict = CustomCollectiveStrategy(communicator=comm.split(0), strict=True)
        try:
            model_in(strict).fit(data, verbose=0)
        except ConfigError as error:
            found["strict"] = str(error)
    return found


@needs_fit
def test_other_loops_compare_batches_too_unless_each_rank_has_its_own(tmp_path: Path) -> None:
    first, second = run_ranks(find_each, 2, tmp_path, timeout=240)
    assert len(first["evaluate"]) == len(first["predict"]) == 1
    assert not first["undivided"]
    assert not first["files"]
    for found in (first, second):
        assert "batch 1 of pass 1 over a dataset of Python code differs" in found["strict"]
