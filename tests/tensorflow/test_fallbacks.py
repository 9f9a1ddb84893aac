"""Fallbacks of what only makes training faster or finds mistakes: each step of it may fail."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from gradring.errors import ConfigError, MismatchError
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

#: By piece, as the log names it: its module below `gradring.tensorflow`, and what fails of it: the
#: name of a function, and after a space, where it has other callers too, that of one of them.
PIECES: dict[str, tuple[str, str]] = {
    "the order of the backward pass": (
        "graph.backward_order",
        "refused_graphs.is_tracing_again refused_graphs.note compat.has compat.gate "
        "compat.replace_input compat.op_is_stateful _ordered_by _Stages _Stages.later "
        "_Stages.is_crossing _Stages._add_ancestors _Stages._add_unneeded _Stages._ordered_before",
    ),
    "the build of a model before its first step": (
        "keras.keras_loops",
        "_element_spec compat.spec_of_replica@_element_spec _has_known_rows",
    ),
    "the look for losses that parts of a batch cannot give": (
        "keras.inseparable_losses",
        "extent_of updates_of@check",
    ),
    "the row that stands in for a batch without samples": (
        "keras.empty_batches",
        "_have_no_rows _has_functions _with_row@_given _filled@_given _map@_given",
    ),
    "the comparison of the arguments of loops": (
        "keras.loop_arguments",
        "_own _is_array _callbacks _shown _text",
    ),
    "the comparison of what replicas assign": (
        "replicas",
        "_common _hashes contents is_assigned_alone@unlike of_tensorflow@unlike",
    ),
    "the check that gradients are reduced": (
        "rules.unreduced",
        "_is_shared _optimizer_above _is_reduced _is_covered updates_of id_of _variables_of _kinds",
    ),
    "the reduction of moving statistics beside gradients": (
        "keras.moving_statistics",
        "MovingStatistics._parts@all_reduce _Parts@all_reduce _Group@all_reduce "
        "MovingStatistics._have_samples@all_reduce",
    ),
    "the search for the layers of batch normalisation that a step calls": (
        "keras.moving_statistics",
        "MovingStatistics._users@_called MovingStatistics._handle@_called",
    ),
    "the list of calls of batch normalisation that are combined": (
        "keras.moving_statistics",
        "MovingStatistics._users@_forget MovingStatistics._handle@_forget",
    ),
    "the names of gradients in messages": (
        "graph.cross_device_ops",
        "Names.of_variables@_names",
    ),
}


@contextmanager
def failing(module: str, name: str) -> Iterator[list[str]]:
    """Inside, a function fails where it is called; the list tells how often."""
    name, _, caller = name.partition("@")
    *path, last = name.split(".")
    owner = functools.reduce(
        getattr, path, importlib.import_module(f"gradring.tensorflow.{module}")
    )
    original, failed = vars(owner)[last], []
    # With variables that it is told, `Names.of_variables` fails; without any, it is the plain way.
    needs = 3 if name == "Names.of_variables" else None

    def fail(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        above: list[str] = []
        while frame is not None and len(above) < 12:
            above.append(frame.f_code.co_name)
            frame = frame.f_back
        if (caller and caller not in above) or (needs and args[needs - 1] is None):
            return getattr(original, "__func__", original)(
                *([owner] if isinstance(original, classmethod) else []), *args, **kwargs
            )
        failed.append(name)
        raise LookupError(f"{name} met what it does not know")

    setattr(owner, last, fail)
    try:
        yield failed
    finally:
        setattr(owner, last, original)


def train(strategy: Any, x: Any) -> list[Any]:
    """The weights of a model with batch normalisation; the last batch has one sample.

    One of its layers is called twice.
    """
    import keras

    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs, twice = keras.Input((2,)), keras.layers.BatchNormalization()
        hidden = keras.layers.Dense(3)(twice(keras.layers.Dense(3)(inputs)))
        hidden = keras.layers.BatchNormalization()(twice(hidden))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(2)(hidden)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
    return [np.array(weight) for weight in model.get_weights()]


def train_with_failures(failures: list[tuple[str, str]]) -> list[tuple[list[str], bool, float]]:
    """For each step that fails: the lines in the log, and how far the weights are off."""
    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.graph import fallback

    lines = kept_lines(logging.WARNING)
    x = np.random.default_rng(0).normal(size=(13, 2)).astype("f")
    results = []
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm, bucket_bytes=1)
        right = train(strategy, x)
        for piece, name in failures:
            fallback._named.clear()
            lines.clear()
            with failing(PIECES[piece][0], name) as failed:
                weights = train(strategy, x)
            off = max(float(np.abs(a - b).max()) for a, b in zip(right, weights, strict=True))
            results.append((lines[:], bool(failed), off))
    return results


#: What fails, by piece and name.
FAILURES = [(piece, name) for piece, (_, names) in PIECES.items() for name in names.split()]
#: The first step of each piece.
QUICK = [(piece, names.split()[0]) for piece, (_, names) in PIECES.items()]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[tuple[str, str], list[Any]]:
    """By failure, the results of both ranks."""
    failures = chosen(request, "failure")
    by_rank = run_ranks(train_with_failures, 2, failures, timeout=850)
    return dict(zip(failures, zip(*by_rank, strict=True), strict=True))


@needs_fit
@pytest.mark.timeout(900)
@pytest.mark.parametrize("failure", marked(FAILURES, QUICK), ids=" ".join)
def test_training_goes_on_where_a_piece_fails(
    trained: dict[tuple[str, str], list[Any]], failure: tuple[str, str]
) -> None:
    piece, name = failure
    for lines, failed, off in trained[failure]:
        assert failed, f"{piece}: {name} was not called"
        assert off < 1e-6, off
        (line,) = [line for line in lines if line.startswith(piece)]
        assert "LookupError" in line


def fit_where_the_row_cannot_be_cut_off(rows: int) -> str:
    from gradring.tensorflow import CustomCollectiveStrategy

    x = np.ones((rows, 2), "f")
    with join() as comm, failing("keras.empty_batches", "_without_row"):
        try:
            train(CustomCollectiveStrategy(communicator=comm), x)
        except Exception as error:
            return str(error)
    return ""


@needs_fit
def test_a_row_that_would_count_ends_the_step() -> None:
    assert run_ranks(fit_where_the_row_cannot_be_cut_off, 2, 12) == ["", ""]
    errors = run_ranks(fit_where_the_row_cannot_be_cut_off, 2, 13)
    assert any("has a batch without samples" in error for error in errors), errors


@pytest.mark.parametrize("kind", [MismatchError, ConfigError])
def test_verdicts_pass(kind: type[Exception]) -> None:
    from gradring.tensorflow.graph.fallback import falls_back

    with pytest.raises(kind), falls_back("a piece", "nothing happens"):
        raise kind("rank 1 has another batch")


def test_the_log_has_one_line_for_a_piece(caplog: pytest.LogCaptureFixture) -> None:
    from gradring.tensorflow.graph.fallback import falls_back

    @falls_back("a piece of this test", "nothing happens")
    def unknown() -> int:
        raise KeyError("what is that")

    with caplog.at_level(logging.WARNING, "gradring"):
        assert unknown() is None
        assert unknown() is None
    (record,) = caplog.records
    assert "a piece of this test" in record.message and "what is that" in record.message
