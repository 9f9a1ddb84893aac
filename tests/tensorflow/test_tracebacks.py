"""Tracebacks of a program's own errors, which begin and end in the program's code."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.seams import table
from gradring.tensorflow.seams.tracebacks import without_own_frames
from support.keras_models import needs_fit

SEAM = table.Seam("keras", "print_exc", "is replaced here")
PROGRAM = """
import keras
import numpy as np

class Wrong(keras.Sequential):
    def train_step(self, data):
        return {"loss": self.no_such_thing}

model = Wrong([keras.layers.Dense(1)])
model.compile("sgd")
model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0)
"""


@needs_fit
def test_an_error_in_a_step_of_fit_shows_the_program_and_no_frame_of_gradring(
    tmp_path: Path,
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "gradring", "run", "-np", "2", "--with-strategy", program],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    frames = [line for line in done.stderr.splitlines() if line.startswith("[0]   File ")]
    assert sum("train.py" in frame for frame in frames) == 2, done.stderr
    assert not any("seams" in frame or "keras_loops" in frame for frame in frames), done.stderr


def modules_of(error: BaseException) -> list[str]:
    entries = traceback.extract_tb(without_own_frames(error))
    return [Path(entry.filename).name for entry in entries]


@pytest.fixture
def of_program() -> BaseException:
    """An error of a program's function that gradring calls."""

    def wrong() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError) as caught:
        table.Replacement(
            SEAM,
            lambda _: wrong(),
            lambda *_: True,
            lambda function: function,
        ).put(Replaced)
        Replaced.print_exc()
    return caught.value


class Replaced:
    @staticmethod
    def print_exc() -> None:
        """Is replaced."""


def test_frames_of_gradring_are_left_out(of_program: BaseException) -> None:
    assert set(modules_of(of_program)) == {Path(__file__).name}


def test_frames_of_an_error_of_gradring_s_own_code_are_kept() -> None:
    with pytest.raises(AttributeError) as caught:
        without_own_frames(None)  # type: ignore[arg-type]
    assert modules_of(caught.value)[-1] == "tracebacks.py"


def test_typed_errors_show_the_program_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        table.Found("keras", "0.0", missing={SEAM: "is missing"}).check()
    assert modules_of(caught.value) == [Path(__file__).name]


def test_all_frames_are_kept_if_the_program_asks(of_program: BaseException) -> None:
    tf.debugging.disable_traceback_filtering()
    try:
        assert without_own_frames(of_program) is of_program.__traceback__
    finally:
        tf.debugging.enable_traceback_filtering()
