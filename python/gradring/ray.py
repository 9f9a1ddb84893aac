"""Ray Train: workers of Ray form a gradring group, again after each restart.

.. code-block:: python

    def train(config):
        strategy = gradring.tensorflow.CustomCollectiveStrategy()
        ...  # the same program as under gradring run

    trainer = gradring.ray.GradringTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=4),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=3), storage_path="/shared"
        ),
    )
    trainer.fit()

Needs ``pip install "gradring[ray]"``. `TensorflowTrainer` takes the place of Ray's, for programs
that stay as they are. Ray's makes its workers use Keras 2; these trainers do not.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradring.machine import packages

with packages.needed_by("gradring.ray"):
    import ray
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.config import RunConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util import get_node_ip_address

from gradring.clusters import without_cluster_variables
from gradring.config.parse import joined_address
from gradring.config.values import DEFAULTS
from gradring.launch.ranks import environments_at, new_token
from gradring.machine.ports import free_ports
from gradring_start import AS_MWMS

__all__ = ["GradringConfig", "GradringTrainer", "TensorflowTrainer", "own_address"]
__dir__ = __all__.copy


@dataclass
class GradringConfig(BackendConfig):  # type: ignore[misc]
    """A backend_config that makes the workers of any ``DataParallelTrainer`` a gradring group.

    Attributes:
        timeout_s: Time limit for forming the group, in seconds; default 300.
        stall_timeout_s: Seconds without progress after which a collective fails although all
            workers are alive; default 1800.
        token: The job's secret, which ``gradring doctor`` needs to query the job; None: a new one
            for each start.

    Examples:
        >>> import gradring.ray
        >>> config = gradring.ray.GradringConfig(timeout_s=60.0, stall_timeout_s=600.0)
        >>> config
        GradringConfig(timeout_s=60.0, stall_timeout_s=600.0)
        >>> trainer = gradring.ray.GradringTrainer(gradring.init, gradring_config=config)
        >>> config.backend_cls  # what a trainer of Ray asks it for
        <class 'gradring.ray._GradringBackend'>
    """

    timeout_s: float = DEFAULTS.timeout
    stall_timeout_s: float = DEFAULTS.stall_timeout
    token: str | None = field(default=None, repr=False)

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that Ray calls after placing the workers."""
        return _GradringBackend


class GradringTrainer(DataParallelTrainer):  # type: ignore[misc]
    """A trainer that runs a function on every worker; ``gradring.init()`` in it joins the group.

    When a worker or its node is lost, the others raise ``PeerLostError``. Ray then restarts all
    workers on the remaining nodes, as often as its ``FailureConfig`` allows, and the function can
    continue from ``ray.train.get_checkpoint()``.

    Args:
        train_loop_per_worker: The function of every worker; takes ``train_loop_config``, or no
            argument.
        gradring_config: Settings of the group.
        **given: Arguments of Ray's ``DataParallelTrainer``: ``train_loop_config``,
            ``scaling_config``, ``run_config``, ``datasets`` and so on.

    Examples:
        >>> import os, ray.train, gradring.ray
        >>> def train(config):
        ...     with gradring.init() as comm:
        ...         return comm.all_reduce(np.full(2, config["value"] + comm.rank)).tolist()
        >>> trainer = gradring.ray.GradringTrainer(
        ...     train,
        ...     train_loop_config={"value": 20},
        ...     scaling_config=ray.train.ScalingConfig(num_workers=2),
        ...     run_config=ray.train.RunConfig(storage_path=os.path.abspath("results")),
        ... )
        >>> trainer.fit().return_value  # of rank 0
        [41, 41]
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        gradring_config: GradringConfig | None = None,
        **given: Any,
    ) -> None:
        config = gradring_config or GradringConfig()
        super().__init__(train_loop_per_worker, backend_config=config, **given)


class TensorflowTrainer(GradringTrainer):
    """`GradringTrainer` with the arguments of ``ray.train.tensorflow.TensorflowTrainer``.

    A ``MultiWorkerMirroredStrategy`` that the function makes is gradring's strategy, by the
    variable ``GRADRING_AS_MWMS``. So gradring must be installed by pip on every node.
    ``TF_CONFIG`` is set as by Ray. ``tf.keras`` is Keras 3 unless the variable
    ``TF_USE_LEGACY_KERAS`` is set, for example in ``runtime_env`` of `ray.init`.

    Args:
        train_loop_per_worker: As for `GradringTrainer`.
        tensorflow_config: A `GradringConfig` with settings of the group. Ray's
            ``TensorflowConfig`` has none, and is accepted.
        run_config: Ray's ``RunConfig``. The trainer adds the variable to ``worker_runtime_env`` in
            a copy, unless it is there.
        **given: Other arguments of Ray's trainer: ``train_loop_config``, ``scaling_config``,
            ``dataset_config``, ``datasets`` and so on.

    Examples:
        >>> import os, ray.train, gradring.ray
        >>> def train():
        ...     import tensorflow as tf
        ...     strategy = tf.distribute.MultiWorkerMirroredStrategy()
        ...     return strategy.communicator.world_size
        >>> trainer = gradring.ray.TensorflowTrainer(
        ...     train,
        ...     scaling_config=ray.train.ScalingConfig(num_workers=2),
        ...     run_config=ray.train.RunConfig(storage_path=os.path.abspath("results")),
        ... )
        >>> trainer.fit().return_value  # of rank 0
        2
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        tensorflow_config: BackendConfig | None = None,
        run_config: RunConfig | None = None,
        **given: Any,
    ) -> None:
        config = tensorflow_config if isinstance(tensorflow_config, GradringConfig) else None
        run = copy.copy(run_config) if run_config is not None else RunConfig()
        runtime = dict(run.worker_runtime_env or {})
        # The start hook reads the variable before the worker imports anything.
        variables = {AS_MWMS: "1", **runtime.get("env_vars", {})}
        run.worker_runtime_env = {**runtime, "env_vars": variables}
        super().__init__(train_loop_per_worker, gradring_config=config, run_config=run, **given)


def own_address() -> str:
    """Returns a free ``host:port`` of this actor's or task's node, to listen at.

    Raises:
        OSError: No port is free.

    Examples:
        >>> import ray, gradring.ray
        >>> ray.get(ray.remote(gradring.ray.own_address).remote())
        '...:...'
    """
    host = get_node_ip_address()
    (port,) = free_ports(1, host)
    return joined_address(host, port)


class _GradringBackend(Backend):  # type: ignore[misc]
    """Sends every worker its rank, the rendezvous and the token."""

    def on_start(self, worker_group: Any, backend_config: GradringConfig) -> None:
        addresses = worker_group.execute(own_address)
        settings = {
            "GRADRING_TIMEOUT_S": str(backend_config.timeout_s),
            "GRADRING_STALL_TIMEOUT_S": str(backend_config.stall_timeout_s),
            "GRADRING_TOKEN": backend_config.token or new_token(),
        }
        environments = environments_at(settings, addresses, len(addresses))
        ray.get(
            [
                worker_group.execute_single_async(rank, _become, environ)
                for rank, environ in enumerate(environments)
            ]
        )


def _become(environ: dict[str, str]) -> None:
    """Replaces this worker's cluster variables by those of ``environ``."""
    for name in set(os.environ) - set(without_cluster_variables(os.environ)):
        del os.environ[name]
    os.environ.update(environ)
