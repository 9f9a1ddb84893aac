"""Cluster resolver for processes of ``mpirun``, ``srun`` and every other launcher."""

from __future__ import annotations

import tensorflow as tf

import gradring
from gradring.config import parse
from gradring.group.communicator import Communicator, listen_beside
from gradring.machine.ports import LOOPBACK, free_ports


class MPIClusterResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):  # type: ignore[misc]
    """A `tf.distribute.cluster_resolver.ClusterResolver` for processes started by ``mpirun``.

    `gradring.init()` finds the place of this process, so Slurm and every other launcher that it
    knows work, too. The processes are tasks of type ``worker``, in the order of their ranks. A
    single process is a cluster of one.

    The constructor forms a group with the other ranks, exchanges addresses, and leaves the group.
    So every rank must make a resolver. `cluster_spec()` then has a free port of each rank, for
    TensorFlow's gRPC server. It is a port of ``GRADRING_PORT`` if that is a range, else any free
    port. Its host is the address at which gradring listens: loopback if all ranks are on one host,
    or the interface in ``GRADRING_INTERFACE``. The port is free until TensorFlow listens there, so
    make the strategy next.

    `tf.distribute.MultiWorkerMirroredStrategy` connects to these addresses. TensorFlow's server
    listens at its port on all interfaces, without gradring's token and TLS.
    `CustomCollectiveStrategy` uses none of the ports: it joins gradring's group again.

    Args:
        rpc_layer: Protocol of TensorFlow's servers; default ``grpc``.
        environment: Text for the property `environment`; default empty, as in TensorFlow.

    Raises:
        ConfigError: The environment describes no valid cluster, or a setting is invalid.
        RendezvousError: Not all ranks made a resolver in time; names the missing ranks.
        GradringError: A rank was lost during the exchange, or has no free port.
        OSError: This process is alone, and its host has no free port.

    Examples:
        >>> resolver = gradring.tensorflow.MPIClusterResolver()
        >>> resolver.task_type, resolver.task_id == rank
        ('worker', True)
        >>> resolver.cluster_spec().num_tasks("worker")
        2
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(resolver)
    """

    def __init__(self, *, rpc_layer: str = "grpc", environment: str = "") -> None:
        with gradring.init() as comm:
            addresses, rank = _addresses(comm), comm.rank
        super().__init__(
            tf.train.ClusterSpec({"worker": addresses}),
            master=addresses[rank],
            task_type="worker",
            task_id=rank,
            environment=environment,
            rpc_layer=rpc_layer,
        )

    # A `SimpleClusterResolver` would say that there are none.
    num_accelerators = tf.distribute.cluster_resolver.ClusterResolver.num_accelerators


def _addresses(comm: Communicator) -> list[str]:
    """Returns a free ``host:port`` of each rank, by rank; every rank must call it."""
    if comm.world_size == 1:  # does not listen
        return [parse.joined_address(LOOPBACK, free_ports(1)[0])]
    # Held until all ranks have chosen, so ranks of one host choose different ports.
    listening = listen_beside(comm)
    return [str(at) for at in comm.all_gather_object(listening.address, name="gRPC addresses")]
