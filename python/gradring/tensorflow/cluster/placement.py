"""Placement of variables on parameter servers by `tf.device("/job:ps/task:0")`.

TensorFlow would execute the whole block on that server. Our servers only keep the variables that
optimizers train. So in the scope of one of our strategies, the worker executes the block as if no
job were named. Variables that are made in the block remember their server.

A block may also name this worker itself, as `"/job:worker/task:0"`. The worker executes this block
as if no job were named, too. TensorFlow knows such a name only in a process of one of its own
clusters, as where a program also makes a `MultiWorkerMirroredStrategy`. There it gets the name.
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
from gradring.tensorflow.cluster.tasks import EVALUATOR, SERVER
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of
from gradring.tensorflow.graph.context import holding
from gradring.tensorflow.seams import keras_names
from gradring.updates.rules import check_server

_Block: TypeAlias = AbstractContextManager[None]

#: Types of tasks that execute a program.
_PROGRAMS = ("chief", "worker", EVALUATOR)

#: Server of variables that are made now, by the enclosing block of `tf.device`.
_server: ContextVar[int | None] = ContextVar("server", default=None)


def know_servers() -> None:
    """Replaces `tf.device`, under all of its names, so that it knows the tasks of our clusters.

    The replacement acts in the scopes of our strategies only. Later calls do nothing.
    """
    if not hasattr(compat.named("ops.device"), "_gradring"):
        compat.replace({"ops.device": _device}, traced=True)
        device = compat.named("ops.device")
        device._gradring = True
        tf.compat.v1.device = device


def remember(variable: Any) -> Any:
    """Records the server of the enclosing `tf.device` block in a new variable, and returns it."""
    if _server.get() is not None:
        variable._gradring_server = _server.get()
    return variable


def server_of(variable: Any) -> int | None:
    """Returns the recorded server of a variable of TensorFlow or Keras, or None."""
    return getattr(keras_names.VALUE.of(variable, variable), "_gradring_server", None)


def _device(original: Callable[[Any], _Block], device: Any) -> _Block:
    """Stands in for `tf.device`.

    Raises:
        gradring.errors.ConfigError: The device names a server that does not exist, or another
            worker.
    """
    name = _name_of(device)
    spec = tf.DeviceSpec.from_string(name) if "job:" in name else None
    is_task = spec is not None and spec.job in (SERVER, *_PROGRAMS)
    strategy = tf.distribute.get_strategy() if is_task else None
    is_ours = communicator_of(strategy) is not None
    if spec is not None and is_ours and not _is_known(spec):
        here = original(spec.replace(job=None, replica=None, task=None).to_string())
        if spec.job == SERVER:
            _check_server(name, spec.task, strategy)
            return _placing(here, spec.task)
        _check_own(name, spec, strategy)
        return _placing(here, None)
    if _server.get() is not None and (spec is not None or device is None):
        return _placing(original(device), None)
    return original(device)


def _is_known(spec: tf.DeviceSpec) -> bool:
    """Returns whether TensorFlow itself knows this process by the name."""
    own = [tf.DeviceSpec.from_string(it.name) for it in tf.config.list_logical_devices("CPU")[:1]]
    return any((it.job, it.task) == (spec.job, spec.task or 0) for it in own)


def _name_of(device: Any) -> str:
    if isinstance(device, tf.DeviceSpec):
        return str(device.to_string())
    # Placement functions and `tf.config.LogicalDevice`s name no parameter server.
    return device if isinstance(device, str) else ""


def _check_own(name: str, spec: tf.DeviceSpec, strategy: Any) -> None:
    job, task = strategy.extended.task
    # A chief computes as a worker does.
    named = (spec.job, task if spec.task is None else spec.task)
    if named != (job, task) and (spec.job, spec.task) != ("worker", None):
        raise ConfigError(
            f"tf.device({name!r}) names another process than this one, which is {job} {task} and "
            "executes the whole program; leave the device out, or name this process"
        )


def _check_server(name: str, server: int | None, strategy: Any) -> None:
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
