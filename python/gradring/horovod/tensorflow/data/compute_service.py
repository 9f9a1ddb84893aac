"""Horovod's compute service, backed by ``gradring run --input-workers K``.

Horovod starts a compute service beside the training, and writes its address to a file. Here the
launcher starts tf.data service with the job, so the file is not read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.data.input_service import check, input_service

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]
__dir__ = __all__.copy

_calls = itertools.count()


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The configuration of a compute service, which is always this job's service.

    Attributes:
        dispatchers: Number of dispatchers.
        workers_per_dispatcher: Number of workers of each dispatcher.
        dispatcher_side: "compute", for dispatchers beside the training. `send_to_data_service`
            refuses "training".
        addresses: Network addresses by host; not used.
        key: Horovod's secret key; not used.
        timeout: Time limit in seconds; not used.

    Examples:
        >>> from gradring.horovod.tensorflow.data import compute_service
        >>> config = compute_service.TfDataServiceConfig.read("service.json")
        >>> config.dispatcher_side, config.workers_per_dispatcher
        ('compute', 1)
        >>> config.write("service.json")
        >>> config.from_dict(config.to_dict()) == config
        True
        >>> config.compute_client()
        Traceback (most recent call last):
        NotImplementedError: compute_client: gradring run ends the input workers with the job; ...
    """

    dispatchers: int = 1
    workers_per_dispatcher: int = 1
    dispatcher_side: str = "compute"
    addresses: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    key: bytes = b""
    timeout: int = 60

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Returns the service of this job; the file is not read and need not exist.

        Args:
            filename: Has no effect.
            wait_for_file_creation: Has no effect.

        Raises:
            gradring.errors.ConfigError: The job has no service.
        """
        del filename, wait_for_file_creation
        _service()
        return TfDataServiceConfig()

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Converts the result of `to_dict`.

        Args:
            config: Fields by name; the key is text in hexadecimal.
        """
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"])})

    def to_dict(self) -> dict[str, Any]:
        """Converts the configuration to values for JSON."""
        return {**asdict(self), "key": self.key.hex()}

    def write(self, filename: str) -> None:
        """Writes the configuration to a file, which `read` does not need.

        Args:
            filename: Path of the file.
        """
        Path(filename).write_text(json.dumps(self.to_dict()))

    def compute_client(self, verbose: int = 1) -> NoReturn:
        """Raises an error: programs cannot end the service.

        Args:
            verbose: Has no effect.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "compute_client: gradring run ends the input workers with the job; leave the call out"
        )


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Yields the argument ``service`` for functions of ``tf.data.experimental.service``.

    Args:
        compute_config: Has no effect: the service is that of the job.
        rank: Has no effect.

    Yields:
        Text of the form ``grpc://host:port``.

    Raises:
        gradring.errors.ConfigError: The job has no service.

    Examples:
        >>> from gradring.horovod.tensorflow.data import compute_service
        >>> config = compute_service.TfDataServiceConfig.read("service.json")
        >>> with compute_service.tf_data_service(config, hvd.rank()) as service:
        ...     service
        ...     distribute = tf.data.experimental.service.distribute("distributed_epoch", service)
        ...     sorted(int(x) for x in tf.data.Dataset.range(4).apply(distribute))
        'grpc://localhost:...'
        [0, 1, 2, 3]
    """
    del compute_config, rank
    yield _service()


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Makes input workers read a dataset; also a method of `tf.data.Dataset`.

    Args:
        dataset: As in `gradring.tensorflow.distribute_input`.
        compute_config: The service.
        rank: The caller's rank.
        size: Number of ranks, for `round_robin`.
        reuse_dataset: True to send each element to one rank; False sends all elements to each rank.
        round_robin: With `reuse_dataset`, ranks take elements in turn; `dataset` must be endless.

    Returns:
        The dataset for the ranks.

    Raises:
        gradring.errors.ConfigError: The job has no service, or `dataset` cannot be sent to one.
        RuntimeError: `compute_config` is for a dispatcher in the ranks.

    Examples:
        >>> from gradring.horovod.tensorflow.data import compute_service
        >>> config = compute_service.TfDataServiceConfig.read("service.json")
        >>> squares = tf.data.Dataset.range(4).map(lambda x: x**2)
        >>> read = squares.send_to_data_service(config, hvd.rank(), hvd.size())
        >>> sorted(int(x) for x in read)
        [0, 1, 4, 9]
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service: dispatcher_side='training' is for tf_data_service; leave it out"
        )
    check(dataset, caller="send_to_data_service")
    in_turn = reuse_dataset and round_robin
    return dataset.apply(
        tf.data.experimental.service.distribute(
            processing_mode="distributed_epoch",
            service=_service(),
            # A second dataset with the same name would get the elements of the first.
            job_name=f"job-{next(_calls)}" if reuse_dataset else None,
            consumer_index=rank if in_turn else None,
            num_consumers=size if in_turn else None,
        )
    )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig, timeout: int | None = None) -> NoReturn:
    """Raises an error: the launcher starts the input workers.

    Args:
        compute_config: Has no effect.
        timeout: Has no effect.

    Raises:
        NotImplementedError: Always.

    Examples:
        >>> from gradring.horovod.tensorflow.data import compute_service
        >>> config = compute_service.TfDataServiceConfig.read("service.json")
        >>> compute_service.compute_worker_fn(config)
        Traceback (most recent call last):
        NotImplementedError: compute_worker_fn: gradring run --input-workers K starts the ...
    """
    raise NotImplementedError(
        "compute_worker_fn: gradring run --input-workers K starts the processes that read"
    )


def _service() -> str:
    service = input_service()
    if service is None:
        raise ConfigError(
            "this job has no tf.data service; type: gradring run --input-workers K ..., with K "
            "processes that read"
        )
    return service
