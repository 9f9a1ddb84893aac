"""A notice to one rank: all save, leave `fit` after the same step, and resume from there."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
import gradring.elastic
from gradring.errors import ConfigError, SaveError
from gradring.testing import Outcome, run_ranks
from support.chosen import chosen, marked
from support.keras_models import needs_fit

pytestmark = needs_fit

STEPS, BATCH, EPOCHS = 5, 8, 2
#: By case: the signal, the rank that gets it, in which epoch, and before the end of which step;
#: 0 is the validation.
CASES = {
    "usr1": (signal.SIGUSR1, 1, 1, 3),
    "term to the chief": (signal.SIGTERM, 0, 1, 2),
    "last step": (signal.SIGUSR1, 0, 0, STEPS),
    "validation": (signal.SIGTERM, 1, 1, 0),
}

QUICK = {"usr1", "validation"}


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4)).astype(np.float32)
    return x, x[:, :1]


def fitted(comm: Any, directory: Path, kind: str, *callbacks: Any) -> Any:
    """A program that resumes: trains to the end, or leaves. Returns epochs, weights and steps."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow import callbacks as module
    from gradring.tensorflow.callbacks import PreemptionCheckpoint
    from gradring.tensorflow.elastic import CommitState, State

    # So few steps may take less than the second after which ranks would ask.
    module.NOTICE_PERIOD_S = 0.0
    strategy = CustomCollectiveStrategy(communicator=comm)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        # A graph would take longer than its steps.
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], run_eagerly=True)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    options = {"validation_data": batches.take(2), "verbose": 0}
    if kind == "backup":
        saver = keras.callbacks.BackupAndRestore(directory / "backup")
        given = [*callbacks, saver, PreemptionCheckpoint(saver)]
        history = model.fit(batches, epochs=EPOCHS, callbacks=given, **options)
        return history.epoch, model.get_weights(), int(np.array(model.optimizer.iterations))
    state = State(model=model, epoch=0, step=0)
    # Only the commit of the notice is written.
    state.checkpoint_to(directory / f"commits-{comm.rank}", every_commits=10**6)
    state.sync(comm)
    saver = CommitState(state, every_steps=4)
    given = [*callbacks, saver, PreemptionCheckpoint(saver)]
    resumed = state.epoch, state.step
    if state.step:
        rest = batches.skip(state.step)
        epoch = state.epoch
        model.fit(rest, initial_epoch=epoch, epochs=epoch + 1, callbacks=given, **options)
    model.fit(batches, initial_epoch=state.epoch, epochs=EPOCHS, callbacks=given, **options)
    return resumed, model.get_weights(), int(np.array(model.optimizer.iterations))


def notice(comm: Any, case: str) -> Any:
    """What the scheduler does."""
    import keras

    signum, rank, its_epoch, step = CASES[case]

    class Notice(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.send(batch + 1)

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.send(0)

        def send(self, now: int) -> None:
            if (comm.rank, self.epoch, now) == (rank, its_epoch, step):
                os.kill(os.getpid(), signum)

    return Notice()


def leave_and_resume(directory: Path, cases: list[str]) -> Any:
    with gradring.init() as comm:
        found = {"alone": fitted(comm, directory / "alone", "commits")}
        for case in cases:
            place = directory / case.replace(" ", "-")
            with pytest.raises(SystemExit) as left:
                fitted(comm, place, "commits", notice(comm, case))
            comm.barrier()
            found[case] = left.value.code, fitted(comm, place, "commits")
        for case in cases:
            place = directory / f"keras-{case}"
            with pytest.raises(SystemExit) as left:
                fitted(comm, place, "backup", notice(comm, case))
            comm.barrier()
            found[f"backup: {case}"] = left.value.code, fitted(comm, place, "backup")
        (directory / "file").write_text("")
        with pytest.raises(SaveError) as failed:
            fitted(comm, directory / "file", "backup", notice(comm, "usr1"))
        found["unsaved"] = str(failed.value)
        found["refused"] = refusals(comm)
        return found


def refusals(comm: Any) -> list[str]:
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.callbacks import PreemptionCheckpoint
    from gradring.tensorflow.elastic import CommitState, State

    with CustomCollectiveStrategy(communicator=comm).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    saver = CommitState(State(model=model, epoch=0, step=0))
    said = []

    def refused(what: Any) -> None:
        with pytest.raises(ConfigError) as raised:
            what()
        said.append(str(raised.value))

    def fit(*callbacks: Any) -> None:
        model.fit(*data(), verbose=0, callbacks=[*callbacks])

    refused(lambda: PreemptionCheckpoint("backup"))
    refused(lambda: PreemptionCheckpoint(saver, signals=[signal.SIGKILL]))
    refused(lambda: PreemptionCheckpoint(saver, signals=["USR1"]))  # type: ignore[list-item]
    refused(lambda: PreemptionCheckpoint(saver, exit_code=256))
    thread = threading.Thread(target=refused, args=[lambda: PreemptionCheckpoint(saver)])
    thread.start()
    thread.join()
    refused(lambda: fit(PreemptionCheckpoint(saver)))
    refused(lambda: fit(saver, PreemptionCheckpoint(saver)))
    backup = keras.callbacks.BackupAndRestore(f"backup-{comm.rank}")

    @gradring.elastic.run(comm, min_workers=2)
    def train(state: Any) -> None:
        refused(lambda: fit(backup, PreemptionCheckpoint(backup)))

    train(gradring.elastic.State(step=0))
    return said


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory, cases = tmp_path_factory.mktemp("saved"), chosen(request, "case")
    return run_ranks(leave_and_resume, 2, directory, cases, timeout=290)


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_all_leave_after_one_step_and_resume_to_the_same_bits(ranks: Any, case: str) -> None:
    places = []
    for found in ranks:
        code, (resumed, weights, steps) = found[case]
        assert code == 143
        assert steps == EPOCHS * STEPS
        for own, alone in zip(weights, found["alone"][1], strict=True):
            np.testing.assert_array_equal(own, alone)
        places.append(resumed)
    _, _, epoch, step = CASES[case]
    assert places[0] == places[1]
    assert places[0] >= (epoch, step or STEPS)


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_a_backup_resumes_with_the_epoch_of_the_notice(ranks: Any, case: str) -> None:
    _, _, epoch, step = CASES[case]
    for found in ranks:
        code, (epochs, _, steps) = found[f"backup: {case}"]
        assert code == 143
        # An epoch whose steps have been done is not done again for its validation.
        begun = epoch if step not in (0, STEPS) else epoch + 1
        assert epochs in ([*range(begun, EPOCHS)], [*range(begun + 1, EPOCHS)])
        assert steps >= EPOCHS * STEPS


def test_a_save_that_fails_is_an_error_on_all_ranks(ranks: Any) -> None:
    for found in ranks:
        assert found["unsaved"].startswith("rank 0 on ")


def test_what_cannot_save_or_listen_is_refused(ranks: Any) -> None:
    for found in ranks:
        parts = [
            "saver='backup' saves nothing",
            "cannot be handled",
            "('USR1',) cannot be handled",
            "exit_code=256",
        ]
        parts += ["main thread", "does not get the callback", "is kept in memory alone"]
        parts += ["inside of elastic.run"]
        for part, said in zip(parts, found["refused"], strict=True):
            assert part in said
            assert said.startswith("PreemptionCheckpoint")


def leave(directory: Path) -> None:
    with gradring.init() as comm:
        fitted(comm, directory, "commits", notice(comm, "usr1"))


def test_all_ranks_end_with_the_exit_code(tmp_path: Path) -> None:
    outcomes: list[Outcome] = run_ranks(leave, 2, tmp_path, check=False)
    assert [outcome.exit_code for outcome in outcomes] == [143, 143]
    said = outcomes[0].output
    assert "fit has saved and leaves in epoch 1 after" in said
    assert "rank 1 on " in said and " got SIGUSR1" in said
