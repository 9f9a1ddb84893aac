"""Runs Horovod's own tests against `gradring.horovod`, from a checkout of Horovod.

``pip install cloudpickle mock packaging parameterized``, which they import, and then
``gradring run -np 2 python tests/horovod/judge.py CHECKOUT test_tensorflow.py [sessions] [-k
WORDS]``

Nothing of Horovod's library is imported: a package `horovod` is made of ours, and of the helpers
that its tests ask for. They are written to run twice, eagerly and in sessions of TensorFlow 1; here
they run eagerly, or in sessions if that is asked for, so that each way has its counts.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def main(checkout: Path, test: str, arguments: list[str]) -> int:
    in_sessions = arguments[:1] == ["sessions"]
    _place_in_environment()
    _pretend(in_sessions)
    tests = checkout / "test" / "parallel"
    sys.path[:0] = [str(tests), str(checkout / "test" / "utils")]
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "-rfE", "--tb=short"]
    return pytest.main([*options, *arguments[in_sessions:], str(tests / test)])


def _place_in_environment() -> None:
    """What Horovod's own launcher tells its processes."""
    import gradring.horovod.tensorflow as hvd

    hvd.init()
    os.environ["HOROVOD_RANK"] = str(hvd.rank())
    os.environ["HOROVOD_SIZE"] = str(hvd.size())


def _each_in_a_session(cls: Any) -> Any:
    """Runs each test of a class in a graph and a session of its own."""
    import tensorflow as tf

    def in_a_session(test: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(test)
        def run(case: Any) -> None:
            with tf.Graph().as_default(), case.test_session():
                test(case)

        return run

    for name, test in list(vars(cls).items()):
        if name.startswith("test"):
            setattr(cls, name, in_a_session(test))
    return cls


def _pretend(in_sessions: bool) -> None:
    """Makes the package `horovod`."""
    import tensorflow as tf
    from tensorflow.python.framework import test_util

    import gradring.horovod.tensorflow as hvd
    import gradring.horovod.tensorflow.keras as hvd_keras

    way = _each_in_a_session if in_sessions else lambda cls: cls
    test_util.run_all_in_graph_and_eager_modes = way
    util = types.ModuleType("horovod.tensorflow.util")
    util._executing_eagerly = tf.executing_eagerly  # type: ignore[attr-defined]
    hvd.util = util
    hvd._executing_eagerly = tf.executing_eagerly
    common = types.ModuleType("horovod.common.util")
    common.is_version_greater_equal_than = _is_at_least  # type: ignore[attr-defined]
    threads = types.ModuleType("horovod.runner.util.threads")
    threads.in_thread = None  # type: ignore[attr-defined]
    root = types.ModuleType("horovod")
    root.tensorflow = hvd  # type: ignore[attr-defined]
    root.keras = hvd_keras  # type: ignore[attr-defined]
    sys.modules |= {
        "horovod": root,
        "horovod.common": types.ModuleType("horovod.common"),
        "horovod.common.util": common,
        "horovod.keras": hvd_keras,
        "horovod.runner": types.ModuleType("horovod.runner"),
        "horovod.runner.util": types.ModuleType("horovod.runner.util"),
        "horovod.runner.util.threads": threads,
        "horovod.tensorflow": hvd,
        "horovod.tensorflow.keras": hvd_keras,
        "horovod.tensorflow.util": util,
    }


def _is_at_least(version: str, least: str) -> bool:
    from packaging.version import parse

    return parse(version) >= parse(least)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
