"""The live line in `fit` and around steps of a strategy."""

import contextlib
import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

import gradring.observe.monitor
from gradring.testing import run_ranks
from support.keras_models import BATCH, STEPS, compiled, dataset, needs_fit, strategy_of
from support.tf_worker import join

EPOCHS = 2
#: Of SGD in `keras_models.py`.
RATE = 0.05
#: No line comes only because a busy machine is slow.
EVERY_S = 1000.0
#: A busy machine may keep the last numbers of a rank for longer than users would wait.
FAREWELL_S = 60.0


def fit(slow: int, directory: str) -> Any:
    import keras

    from gradring.tensorflow import ScalarWriter
    from gradring.tensorflow.callbacks import LiveLine

    norms: list[float] = []
    losses: list[float] = []

    class Sleep(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.2 if comm.rank == slow else 0)
            self.before = self.model.get_weights()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps = zip(self.before, self.model.get_weights(), strict=True)
            gradients = [(before - after) / RATE for before, after in steps]
            norms.append(sum((gradient**2).sum() for gradient in gradients) ** 0.5)
            losses.append(logs["loss"])

    gradring.observe.monitor.FAREWELL_S = FAREWELL_S
    output = io.StringIO()
    # With weights of chance the losses of two ranks may have the same first digits.
    keras.utils.set_random_seed(1)
    with join() as comm:
        model = compiled(strategy_of(comm), "mlp", "SGD")
        log = os.path.join(directory, "steps.jsonl")
        line = LiveLine(
            BATCH,
            every_steps=4,
            every_s=EVERY_S,
            stream=output,
            log=log,
            tensorboard=directory,
            gradient_norm=True,
        )
        data = dataset()
        model.fit(data, epochs=EPOCHS, verbose=0, validation_data=data, callbacks=[Sleep(), line])
        if comm.rank == 0:
            # Where nothing can be written, the curves end, and not the training.
            facts = json.loads(Path(log).read_text().splitlines()[0])
            writer = ScalarWriter(os.path.join(log, "nothing"))
            for _ in range(2):
                writer(facts)
            writer.close()
        comm.barrier()
    return output.getvalue().splitlines(), norms, losses


@needs_fit
def test_fit_shows_lines_and_a_table(tmp_path: Path) -> None:
    (lines, norms, losses), (nothing, *_) = run_ranks(fit, 2, 1, str(tmp_path), timeout=300)
    steps = EPOCHS * STEPS
    assert nothing == []
    assert len(lines) == (steps - 1) // 4 + 4
    for line in lines[:-4]:
        assert re.match(r"step \d+ \| [\d.]+ ms = compute .* samples/s \| ", line), lines
    # Validation is no step, so the slow rank's sleep stays most of what others wait for.
    assert any("slowest: rank 1" in line for line in lines[:-4]), lines
    assert lines[-3].split()[2] == lines[-2].split()[2] == str(steps - 1)
    assert lines[-1].startswith("Rank 1 on ")
    names = lines[-4].replace("gradient norm", "gradient_norm").split()[-3:]
    assert set(names) == {"loss", "accuracy", "gradient_norm"}
    numbers = [map(float, line.split()[-3:]) for line in lines[-3:-1]]
    own, other = (dict(zip(names, row, strict=True)) for row in numbers)
    # Each worker has half of each batch.
    assert own["loss"] != other["loss"]
    assert (own["loss"] + other["loss"]) / 2 == pytest.approx(losses[-1], rel=1e-3)
    # The triangle's inequality, for the mean of two gradients.
    both = sorted([own["gradient_norm"], other["gradient_norm"]])
    assert (both[1] - both[0]) / 2 < norms[-1] * 1.001 < 1.002 * sum(both) / 2, (both, norms[-1])
    assert sum(both) / 2 < 3 * norms[-1]
    rows = [json.loads(row) for row in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) - 4
    for line, row in zip(lines, rows, strict=False):
        named = re.search(r"slowest: rank (\d)", line)
        assert (named and int(named[1])) == (row["slowest"] and row["slowest"]["rank"])
    # The other rank's numbers come with its first gossip.
    assert "1" in rows[-1]["ranks"]
    scalars = {tag: dict(values) for tag, values in scalars_in(tmp_path).items()}
    expected = {"loss", "accuracy", "gradient_norm", "steps_per_s", "samples_per_s"}
    assert {tag.removeprefix("gradring/") for tag in scalars if "rank_" not in tag} == expected
    assert list(scalars["gradring/rank_0/wait_ms"]) == [row["step"] for row in rows]
    for row in rows:
        step = row["step"]
        assert scalars["gradring/loss"][step] == pytest.approx(losses[step - 1], rel=1e-4)
        assert 0 <= scalars["gradring/accuracy"][step] <= 1
        for name, value in row["ranks"]["0"].items():
            assert scalars[f"gradring/rank_0/{name}"][step] == pytest.approx(value, rel=1e-4)
        assert scalars["gradring/gradient_norm"][step] == pytest.approx(norms[step - 1], rel=1e-3)


def scalars_in(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag, the steps and values of the one event file."""
    import tensorflow as tf

    (file,) = directory.glob("events.out.tfevents.*")
    scalars: dict[str, list[tuple[int, float]]] = {}
    for record in tf.data.TFRecordDataset(str(file)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            number = float(tf.make_ndarray(value.tensor))
            scalars.setdefault(value.tag, []).append((event.step, number))
    return scalars


def fit_with_clipping(directory: str) -> None:
    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.callbacks import LiveLine

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        model = compiled(strategy, "mixed precision", "SGD", clipnorm=1e-3)
        model.fit(dataset(), verbose=0)
        line = LiveLine(every_steps=4, tensorboard=directory, gradient_norm=True)
        model.fit(dataset(), verbose=0, callbacks=[line])


@needs_fit
@pytest.mark.slow
def test_the_gradient_norm_is_neither_clipped_nor_scaled(tmp_path: Path) -> None:
    """Though the step was traced by a `fit` without it."""
    run_ranks(fit_with_clipping, 1, str(tmp_path), timeout=300)
    scalars = scalars_in(tmp_path)
    norms = [norm for _, norm in scalars["gradring/gradient_norm"]]
    assert norms and all(0.01 < norm < 100 for norm in norms), norms
    own = [norm for _, norm in scalars["gradring/rank_0/gradient_norm"]]
    assert own == pytest.approx(norms, rel=1e-5)


def fit_below_a_bar() -> dict[Any, str]:
    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.callbacks import LiveLine

    said = {}
    with join() as comm:
        model = compiled(CustomCollectiveStrategy(communicator=comm), "mlp", "SGD")
        for verbose in ("auto", 1, 2):
            line = LiveLine(every_steps=2, every_s=EVERY_S)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                model.fit(dataset(), epochs=EPOCHS, verbose=verbose, callbacks=[line])
            said[verbose] = output.getvalue()
    return said


@needs_fit
def test_a_line_does_not_continue_a_progress_bar() -> None:
    """A bar has no end of line before its epoch ends."""
    (said,) = run_ranks(fit_below_a_bar, 1, timeout=300)
    for verbose, output in said.items():
        lines = output.splitlines()
        shown = [line for line in lines if re.search(r"step \d+ \|", line)]
        assert len(shown) > 1 and all(line.startswith("step ") for line in shown), output
        assert any("s/step" in line for line in lines), output
        assert verbose != 2 or "" not in lines, output


def fit_restored() -> str:
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.callbacks import LiveLine

    class Restore(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.optimizer._iterations.assign(100)

    output = io.StringIO()
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        model = compiled(strategy, "mlp", "SGD", gradient_accumulation_steps=2)
        line = LiveLine(every_steps=5, every_s=EVERY_S, stream=output)
        model.fit(dataset(), verbose=0, callbacks=[line, Restore()])
    return output.getvalue()


@needs_fit
@pytest.mark.slow
def test_steps_are_numbered_from_those_of_a_restored_optimizer() -> None:
    """Though a callback restored it after the live line's own start."""
    (output,) = run_ranks(fit_restored, 1, timeout=300)
    assert re.findall(r"^step (\d+)", output, re.M) == ["106", "111"], output


def fit_slow_input(log: str) -> None:
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.callbacks import LiveLine

    def slowly() -> Any:
        for batch in dataset():
            time.sleep(0.2)
            yield batch

    with join() as comm:
        model = compiled(CustomCollectiveStrategy(communicator=comm), "mlp", "SGD")
        model.fit(dataset(), verbose=0)
        data = tf.data.Dataset.from_generator(slowly, output_signature=dataset().element_spec)
        line = LiveLine(every_steps=STEPS - 1, every_s=EVERY_S, stream=io.StringIO(), log=log)
        model.fit(data, verbose=0, callbacks=[line])


@needs_fit
def test_input_that_is_read_inside_the_graph_is_told_apart(tmp_path: Path) -> None:
    """Though the step was traced by a `fit` without a live line."""
    log = tmp_path / "steps.jsonl"
    run_ranks(fit_slow_input, 1, str(log), timeout=300)
    own = json.loads(log.read_text())["ranks"]["0"]
    # A few batches were read ahead while the first step was traced.
    assert own["input_ms"] > 50, own
    parts = ("compute_ms", "input_ms", "comm_ms", "wait_ms")
    assert sum(own[part] for part in parts) == pytest.approx(own["step_ms"])
