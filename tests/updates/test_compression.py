"""Gradients that travel in fewer bytes: one job of three ranks, with everything in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.errors import ConfigError
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import compiled, needs_fit, state_of, train_by_fit
from support.tf_worker import join, refusal

pytestmark = needs_fit

WORLD_SIZE = 3
#: How many of the bytes of an uncompressed sum a rank sends at most, in hundredths; and how much of
#: its largest element a mean over `STEPS` steps lacks, in thousandths.
BOUNDS = {
    updates.Int8(): (28, 1),
    updates.Bits16(): (55, 1),
    updates.Bits16("float16"): (55, 1),
    updates.TopK(0.1): (32, 60),
    updates.PowerSGD(rank=8): (42, 60),
}
#: One of each algorithm, that takes the kernels of small models: what others do is encoding.
KINDS = (updates.Int8(), updates.TopK(0.1), updates.PowerSGD(rank=2))
#: Those that are traced in no time, and have state of their own.
QUICK = KINDS[1:]
QUICK_FIT = KINDS[1:2]
FITS = "test_fit_trains_equal_replicas_nearly_as_without_compression"
SHAPES = ((60, 80), (7,), (3, 3, 8, 32))
STEPS = 60


def job(kinds: list[Any], fitted: list[Any]) -> dict[str, Any]:
    import tensorflow as tf

    with join() as comm:
        (cpu,) = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        done = {
            "plain": constant(comm, None),
            "compressed": {what: constant(comm, what) for what in BOUNDS},
            "overflow": {what: overflow(comm, what) for what in kinds},
            "restored": {what: restored(comm, what) for what in kinds},
            "fit": {what: by_fit(what) for what in (None, *fitted)},
            "refused": refused(comm),
        }
        # The last: it ends the group.
        return {**done, "differing": differing(comm)}


def longer_job(directory: Path) -> dict[str, Any]:
    with join() as comm:
        return {
            "eagerly": [constant(comm, updates.Int8(), eager=each)[0] for each in (False, True)],
            "added up": {what: by_fit(what, sync_every=3) for what in (None, updates.Int8())},
            "restored from a file": restored(comm, updates.Int8(), directory / "model.keras"),
        }


def strategy_by(compression: Any, sync_every: int = 1, **options: Any) -> Any:
    from gradring.tensorflow import CustomCollectiveStrategy

    return CustomCollectiveStrategy(update=updates.AllReduce(compression, sync_every), **options)


def gradients_of(rank: int) -> list[Any]:
    """Of very different sizes in each block, so that small ones are lost without feedback."""
    draw = np.random.default_rng(rank)
    made = [0.1 * draw.normal(size=shape).astype(np.float32) for shape in SHAPES]
    for gradient in made:
        gradient.reshape(-1)[:: 7 + rank] *= 300.0
    return made


def training(compression: Any) -> tuple[list[Any], Callable[..., None]]:
    """Variables, and a step by these gradients."""
    import keras
    import tensorflow as tf

    strategy = strategy_by(compression)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(*gradients: Any) -> None:
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    return variables, step


def constant(comm: Any, compression: Any, eager: bool = False) -> tuple[Any, int]:
    """The mean of what was applied of constant gradients, and the bytes of a step."""
    import tensorflow as tf

    variables, step = training(compression)
    tf.config.run_functions_eagerly(eager)
    gradients = [tf.constant(gradient) for gradient in gradients_of(comm.rank)]
    before = comm.stats()["bytes_sent"]
    for _ in range(STEPS):
        step(*gradients)
    tf.config.run_functions_eagerly(False)
    sent = (comm.stats()["bytes_sent"] - before) / STEPS
    return [-np.array(variable) / STEPS for variable in variables], sent


def by_fit(compression: Any, sync_every: int = 1) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return train_by_fit(strategy_by(compression, sync_every), "mixed precision", "Adam")


def overflow(comm: Any, compression: Any) -> list[Any]:
    """What is applied of an infinite gradient of one rank, in the step after, and so of a NaN."""
    import tensorflow as tf

    variables, step = training(compression)
    applied = []
    for factor in (np.inf if comm.rank == 1 else 1.0, 1.0, np.nan if comm.rank == 2 else 1.0, 1.0):
        for variable in variables:
            variable.assign(tf.zeros_like(variable))
        step(*(tf.constant(gradient * factor) for gradient in gradients_of(comm.rank)))
        applied.append([np.array(variable) for variable in variables])
    return applied


def restored(comm: Any, compression: Any, path: Path | None = None) -> list[Any]:
    """The weights after some steps from a commit, and after the same steps once more."""
    import tensorflow as tf

    from gradring.tensorflow import restore, save
    from gradring.tensorflow.elastic import State

    strategy = strategy_by(compression)
    model = compiled(strategy, "mlp", "Adam")
    state = State(model=model)
    state.commit()
    if path:
        save(model, path)
    draw = np.random.default_rng(comm.rank)
    values = [draw.normal(size=v.shape).astype(np.float32) for v in model.trainable_variables]

    def replica_step() -> None:
        model.optimizer.apply([tf.constant(value) for value in values])

    step = tf.function(lambda: strategy.run(replica_step))
    found = []
    for _ in range(2):
        for _ in range(3):
            step()
        found.append(state_of(model, model.optimizer)["weights"])
        if path:
            restore(model, path)
        else:
            state.restore()
    return found


def refused(comm: Any) -> list[str]:
    return [
        refusal(lambda: strategy_by(updates.Int8(), check_gradients="warn")),
        refusal(lambda: strategy_by(updates.Int8(), devices=["CPU:0", "CPU:1"])),
        refusal(lambda: strategy_by(updates.TopK(0.01 * (1 + comm.rank // 2)))),
    ]


def differing(comm: Any) -> str:
    """What a rank hears when one has the gradient of another variable."""
    import keras
    import tensorflow as tf

    from gradring.errors import MismatchError

    strategy = strategy_by(updates.Int8())
    with strategy.scope():
        kernels = [tf.Variable(tf.zeros([300, 3]), name=name) for name in ("first", "second")]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(kernels)
    kernel = kernels[comm.rank == 2]

    def replica_step() -> None:
        optimizer.apply([tf.ones([300, 3]) if v is kernel else None for v in kernels])

    try:
        strategy.run(replica_step)
    except MismatchError as error:
        return str(error)
    return "not refused"


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    kinds, fitted = chosen(request, "what"), chosen(request, "what", FITS)
    return run_ranks(job, WORLD_SIZE, kinds, fitted, timeout=280)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(longer_job, WORLD_SIZE, tmp_path_factory.mktemp("saved"), timeout=280)


def assert_same_bits(all_ranks: Any) -> None:
    for one in all_ranks:
        for array, first in zip(one, all_ranks[0], strict=True):
            np.testing.assert_array_equal(array, first)


@pytest.mark.parametrize("compression", BOUNDS, ids=str)
def test_what_was_applied_becomes_the_sum_of_the_gradients(ranks: Any, compression: Any) -> None:
    each = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    expected = [np.sum(gradients, axis=0) for gradients in zip(*each, strict=True)]
    assert_same_bits([rank["compressed"][compression][0] for rank in ranks])
    means, sent = ranks[0]["compressed"][compression]
    hundredths, thousandths = BOUNDS[compression]
    for mean, total in zip(means, expected, strict=True):
        # Vectors are not compressed.
        lacking = thousandths / 1000 * np.abs(total).max() if total.ndim > 1 else 1e-4
        np.testing.assert_allclose(mean, total, rtol=0, atol=lacking)
    assert sent <= hundredths / 100 * ranks[0]["plain"][1]


@pytest.mark.slow
def test_steps_outside_of_functions_do_the_same(longer: Any) -> None:
    inside, outside = longer[0]["eagerly"]
    for one, other in zip(inside, outside, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=0.03)


@pytest.mark.parametrize("what", marked(KINDS, QUICK_FIT), ids=str)
def test_fit_trains_equal_replicas_nearly_as_without_compression(ranks: Any, what: Any) -> None:
    assert_same_bits([rank["fit"][what]["weights"] for rank in ranks])
    (loss,), (plain,) = (ranks[0]["fit"][which]["logs"]["loss"] for which in (what, None))
    assert abs(loss - plain) < 0.05 * plain


@pytest.mark.slow
def test_gradients_that_were_added_up_are_compressed(longer: Any) -> None:
    found = [rank["added up"] for rank in longer]
    assert_same_bits([one[updates.Int8()]["weights"] for one in found])
    for array, plain in zip(*(found[0][what]["weights"] for what in found[0]), strict=True):
        np.testing.assert_allclose(array, plain, atol=0.02)


@pytest.mark.parametrize("what", marked(KINDS, QUICK), ids=str)
def test_what_is_not_finite_shows_on_all_ranks_and_is_not_remembered(ranks: Any, what: Any) -> None:
    for step in range(4):
        assert_same_bits([rank["overflow"][what][step] for rank in ranks])
        kernels = [part for part in ranks[0]["overflow"][what][step] if part.ndim > 1]
        assert all(np.isfinite(kernel).all() for kernel in kernels) == (step in (1, 3))


@pytest.mark.parametrize("what", marked(KINDS, QUICK), ids=str)
def test_a_restored_training_has_lost_nothing_yet(ranks: Any, what: Any) -> None:
    for rank in ranks:
        assert_same_bits(rank["restored"][what])


@pytest.mark.slow
def test_a_training_that_is_restored_from_a_file_has_lost_nothing_yet(longer: Any) -> None:
    for rank in longer:
        assert_same_bits(rank["restored from a file"])


def test_owners_need_ranks_that_are_all_connected() -> None:
    from gradring.tensorflow.rules.factory import make

    many: Any = SimpleNamespace(rank=3, host="here", world_size=65)
    with pytest.raises(ConfigError, match="at most 64 ranks can do, and these are 65"):
        make(updates.AllReduce(updates.Int8()), many, 1, None, 1)
    make(updates.AllReduce(updates.TopK(0.1)), many, 1, None, 1)


def test_what_cannot_be_had_together_is_refused(ranks: Any) -> None:
    for rank in ranks:
        checks, devices, mismatch = rank["refused"]
        assert checks.startswith("ConfigError: check_gradients='warn' looks at gradients that")
        assert "only AllReduce() trains several" in devices
        assert mismatch.startswith("MismatchError: rank 2 on ")
        assert "TopK(fraction=0.02)" in mismatch
        assert "TopK(fraction=0.01)" in mismatch


def test_a_rank_with_the_gradient_of_another_variable_is_named(ranks: Any) -> None:
    for rank in ranks:
        assert "compressed sum" in rank["differing"]
        assert "rank 2" in rank["differing"]
