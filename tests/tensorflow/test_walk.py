"""The way from an optimizer of Keras to the op: how many files of the package a step enters."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gradring
from gradring.testing import run_ranks
from support.tf_worker import join

PACKAGE = str(Path(gradring.__file__).parent)
#: A reader opens as many files to follow a step; lower it when the way gets shorter.
FILES_MAX = 25


def files_to_the_op() -> list[str]:
    """The files that tracing a step enters from `Optimizer.apply` on, in order."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
        files: list[str] = []

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones([4, 2])))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            with noted_until("GradringStart", files):
                optimizer.apply(gradients, variables)

        tf.function(strategy.run, autograph=False)(step)
    return files


@contextlib.contextmanager
def noted_until(op: str, files: list[str]) -> Iterator[None]:
    """Notes which files are entered before TensorFlow is told to make `op`."""

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(PACKAGE):
            file = code.co_filename.removeprefix(PACKAGE)
            if file not in files:
                files.append(file)
            return
        arguments = (frame.f_locals.get(each) for each in code.co_varnames[: code.co_argcount])
        if any(isinstance(each, str) and each == op for each in arguments):
            sys.setprofile(None)

    sys.setprofile(on_event)
    try:
        yield
        assert sys.getprofile() is None, f"TensorFlow was not told to make {op}"
    finally:
        sys.setprofile(None)


def test_few_files_are_on_the_way_from_an_optimizer_to_the_op() -> None:
    for files in run_ranks(files_to_the_op, 2):
        assert any(file.endswith("start_wait.py") for file in files), files
        assert len(files) <= FILES_MAX, files
