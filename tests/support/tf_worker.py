"""The first steps of every worker process of these tests."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def join(**settings: Any) -> Any:
    """`gradring.init` in a process that shares its core."""
    import gradring

    take_one_thread()
    return gradring.init(**settings)


def take_one_thread() -> None:
    """Gives TensorFlow one thread of each kind: several ranks share a core."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)


def refusal(make: Callable[[], object]) -> str:
    """The error that a call raises, as text."""
    from gradring.errors import GradringError

    try:
        make()
    except GradringError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
