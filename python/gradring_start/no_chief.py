"""TensorFlow's own parameter servers under ``gradring run --ps``, where they have no coordinator.

A `tf.distribute.ParameterServerStrategy` needs a chief, which gives steps to waiting workers.
``gradring run`` starts only workers and servers, so such a program would wait without limit.
``gradring run --ps`` sets ``GRADRING_SERVERS=1``, with which the start hook calls `install`. Each
worker then raises an error before it would wait. A program of TensorFlow 1 whose workers have
sessions needs no chief, and is left as it is.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: Types of tasks that give steps to workers.
_COORDINATORS = ("chief", "master")


def install(tensorflow: ModuleType) -> None:
    """Makes workers raise an error that would otherwise wait for a chief."""
    distribute = tensorflow.distribute
    server, strategy = distribute.Server, distribute.ParameterServerStrategy
    join, make = server.join, strategy.__init__

    @functools.wraps(join)
    def join_unless_in_vain(self: Any) -> None:
        definition = self.server_def
        jobs = {job.name for job in definition.cluster.job}
        # In-graph replication of TensorFlow 1 has workers that wait for the session of another one.
        if definition.job_name == "worker" and tensorflow.executing_eagerly():
            _check(jobs, definition.task_index)
        join(self)

    @functools.wraps(make)
    def make_unless_in_vain(self: Any, cluster_resolver: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(cluster_resolver, "task_type", None) == "worker":
            _check(set(cluster_resolver.cluster_spec().jobs), cluster_resolver.task_id)
        make(self, cluster_resolver, *args, **kwargs)

    _replace(server, "join", join_unless_in_vain)
    _replace(strategy, "__init__", make_unless_in_vain)


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


def _check(jobs: set[str], worker: int) -> None:
    """Raises an error if a worker of a cluster of these jobs would wait for nobody."""
    if "ps" not in jobs or jobs.intersection(_COORDINATORS):
        return
    from gradring.errors import ConfigError

    raise ConfigError(
        f"worker {worker} would wait without limit: TensorFlow's own parameter servers need a "
        "chief, and gradring run --ps starts none; make a gradring.tensorflow."
        "CustomCollectiveStrategy(update=gradring.updates.ParameterServer()) in the program, or "
        "start it without gradring run"
    )
