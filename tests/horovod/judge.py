"""Runs Horovod's own tests against `gradring.horovod`, from a checkout of Horovod.

``pip install cloudpickle mock packaging parameterized``, which they import, and then
``gradring run -np 2 python tests/horovod/judge.py CHECKOUT test_tensorflow.py [-k WORDS]``

Nothing of Horovod's library is imported: a package `horovod` is made of ours, and of the helpers
that its tests ask for. They are written to run twice, eagerly and in sessions of TensorFlow 1.
gradring does not work in sessions, so they run once, eagerly.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest


def main(checkout: Path, test: str, arguments: list[str]) -> int:
    _place_in_environment()
    _pretend()
    tests = checkout / "test" / "parallel"
    sys.path[:0] = [str(tests), str(checkout / "test" / "utils")]
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "-rfE", "--tb=short"]
    return pytest.main([*options, *arguments, str(tests / test)])


def _place_in_environment() -> None:
    """What Horovod's own launcher tells its processes."""
    import gradring.horovod.tensorflow as hvd

    hvd.init()
    os.environ["HOROVOD_RANK"] = str(hvd.rank())
    os.environ["HOROVOD_SIZE"] = str(hvd.size())


def _pretend() -> None:
    """Makes the package `horovod`."""
    import tensorflow as tf
    from tensorflow.python.framework import test_util

    import gradring.horovod.tensorflow as hvd
    import gradring.horovod.tensorflow.keras as hvd_keras

    # Only eagerly.
    test_util.run_all_in_graph_and_eager_modes = lambda cls: cls
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
