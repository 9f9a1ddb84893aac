"""Placement by `tf.device("/job:ps/task:0")`: which parameter server is to keep a variable.

TensorFlow would execute all that stands in such a block on that server. Ours only keep what
optimizers train, so in the scope of a strategy of ours the worker executes it, as if the job were
not named, and the variables that are made in it remember their server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias

import tensorflow as tf

from gradring import updates
from gradring.errors import ConfigError
from gradring.tensorflow.cluster.tasks import SERVER
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of
from gradring.tensorflow.graph.context import holding
from gradring.tensorflow.seams import keras_names
from gradring.updates.rules import check_server

_Block: TypeAlias = AbstractContextManager[None]

#: On which server the variables are that are being made.
_server: ContextVar[int | None] = ContextVar("server", default=None)


def know_servers() -> None:
    """From now on, `tf.device` knows the parameter servers in the scopes of our strategies; once.

    It does by all of its names.
    """
    if not hasattr(compat.named("ops.device"), "_gradring"):
        compat.replace({"ops.device": _device}, traced=True)
        device = compat.named("ops.device")
        device._gradring = True
        tf.compat.v1.device = device


def remember(variable: Any) -> Any:
    """The variable, which has just been made; it belongs where the block around it says."""
    if _server.get() is not None:
        variable._gradring_server = _server.get()
    return variable


def server_of(variable: Any) -> int | None:
    """The server that the block said in which a variable was made; of TensorFlow or of Keras."""
    return getattr(keras_names.VALUE.of(variable, variable), "_gradring_server", None)


def _device(original: Callable[[Any], _Block], device: Any) -> _Block:
    """What `tf.device` does.

    Raises:
        gradring.errors.ConfigError: It names a server that there is not.
    """
    name = _name_of(device)
    spec = tf.DeviceSpec.from_string(name) if "job:" in name else None
    strategy = tf.distribute.get_strategy() if spec is not None and spec.job == SERVER else None
    if spec is not None and communicator_of(strategy) is not None:
        _check(name, spec.task, strategy)
        here = spec.replace(job=None, replica=None, task=None).to_string()
        return _placing(original(here), spec.task)
    if _server.get() is not None and (spec is not None or device is None):
        return _placing(original(device), None)
    return original(device)


def _name_of(device: Any) -> str:
    if isinstance(device, tf.DeviceSpec):
        return str(device.to_string())
    # A `tf.config.LogicalDevice` has one; a function has none that would be meant.
    return device if isinstance(device, str) else ""


def _check(name: str, server: int | None, strategy: Any) -> None:
    rule = strategy.update_rule
    if not isinstance(rule, updates.ParameterServer):
        communicator = strategy.communicator
        raise ConfigError(
            f"tf.device({name!r}) on rank {communicator.rank} of {communicator.host}: "
            f"update={rule} has no parameter servers; pass update=updates.ParameterServer(...) and "
            "start servers by `gradring run -np 3 --ps 1`, or leave the device out"
        )
    check_server(f"tf.device({name!r}) names", server or 0, strategy.extended.servers)


@contextlib.contextmanager
def _placing(block: _Block, server: int | None) -> Iterator[None]:
    with holding(_server, server), block:
        yield
