"""Horovod's names for tf.data service: ``gradring run --input-workers K`` is what they find.

Horovod starts a compute service of its own beside the training, and hands out a file that says
where it is. Here the launcher starts tf.data service with the job, so no file is read.
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

_calls = itertools.count()


@dataclass(frozen=True)
class TfDataServiceConfig:
    """Which service a program uses: that of this job.

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
        """The service of this job, whatever the file is called, and whether or not it exists.

        Raises:
            gradring.errors.ConfigError: The job has no service.
        """
        del filename, wait_for_file_creation
        _service()
        return TfDataServiceConfig()

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """What `to_dict` has made."""
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"])})

    def to_dict(self) -> dict[str, Any]:
        """As what JSON takes."""
        return {**asdict(self), "key": self.key.hex()}

    def write(self, filename: str) -> None:
        """Writes the file that `read` does not need."""
        Path(filename).write_text(json.dumps(self.to_dict()))

    def compute_client(self, verbose: int = 1) -> NoReturn:
        """Horovod's way to end its service.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "compute_client: gradring run ends the input workers with the job; leave the call out"
        )


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The ``service`` for what ``tf.data.experimental.service`` has.

    Yields:
        ``grpc://host:port``.

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
    """Has input workers read a dataset; also a method of `tf.data.Dataset`.

    Args:
        dataset: As for `gradring.tensorflow.distribute_input`.
        compute_config: Which service.
        rank: The caller's.
        size: How many ranks there are, for `round_robin`.
        reuse_dataset: Each element goes to one rank; else each rank gets all of them.
        round_robin: With `reuse_dataset`, ranks take elements in turn; `dataset` must be endless.

    Returns:
        What the ranks read.

    Raises:
        gradring.errors.ConfigError: The job has no service, or `dataset` is not for one.
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
    check(dataset, what="send_to_data_service")
    in_turn = reuse_dataset and round_robin
    return dataset.apply(
        tf.data.experimental.service.distribute(
            processing_mode="distributed_epoch",
            service=_service(),
            # Of two datasets with one name, the second would have the elements of the first.
            job_name=f"job-{next(_calls)}" if reuse_dataset else None,
            consumer_index=rank if in_turn else None,
            num_consumers=size if in_turn else None,
        )
    )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig, timeout: int | None = None) -> NoReturn:
    """What Horovod runs in processes that read.

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
