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

Needs ``pip install "gradring[ray]"``. Ray's own ``TensorflowTrainer`` makes its workers use Keras
2; this trainer does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradring.machine import packages

with packages.needed_by("gradring.ray"):
    import ray
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util import get_node_ip_address

from gradring.clusters import without_cluster_variables
from gradring.config.parse import joined_address
from gradring.config.values import DEFAULTS
from gradring.launch.ranks import environments_at, new_token
from gradring.machine.ports import free_ports

__all__ = ["GradringConfig", "GradringTrainer", "own_address"]
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
