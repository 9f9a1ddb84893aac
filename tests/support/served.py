"""Workers of a test and servers beside them: threads of rank 0, where a job has processes."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradring import updates

#: The group of the test, whose variables a strategy would read.
OF_GROUP = ("GRADRING_RANK", "GRADRING_WORLD_SIZE", "GRADRING_RENDEZVOUS")
RATE = 0.125


@contextlib.contextmanager
def served(comm: Any, rule: updates.ParameterServer, servers: int = 1) -> Iterator[Any]:
    """A strategy by this rule for each rank of the test's group; all leave together."""
    from gradring.tensorflow import CustomCollectiveStrategy

    with serving(comm, rule, servers):
        strategy = CustomCollectiveStrategy(update=rule)
        yield strategy
        strategy.leave()


@contextlib.contextmanager
def serving(
    comm: Any, rule: updates.ParameterServer, servers: int = 1, made: list[Any] | None = None
) -> Iterator[list[Any]]:
    """Servers for all ranks, which strategies find by TF_CONFIG; rank 0 has them, and fills `made`.

    Yields:
        A list that has what the servers have counted, on rank 0, when all is over.
    """
    from gradring.machine.ports import free_ports
    from gradring.tensorflow.cluster.serving import make_server

    ports = np.array(free_ports(servers) if comm.rank == 0 else [0] * servers)
    addresses = [f"127.0.0.1:{port}" for port in comm.broadcast(ports)]
    made, threads = [] if made is None else made, []
    counted: list[Any] = []
    if comm.rank == 0:
        for index in range(servers):
            made.append(make_server(rule, addresses, index, comm.world_size))
            threads.append(threading.Thread(target=made[-1].serve))
            threads[-1].start()
    workers = [f"127.0.0.1:{1 + rank}" for rank in range(comm.world_size)]
    config = {
        "cluster": {"worker": workers, "ps": addresses},
        "task": {"type": "worker", "index": comm.rank},
    }
    kept = {name: os.environ.pop(name) for name in OF_GROUP if name in os.environ}
    os.environ["TF_CONFIG"] = json.dumps(config)
    try:
        yield counted
        for thread in threads:
            thread.join()
        counted += [server.stats() for server in made]
    finally:
        for server in made:
            server.close()
        del os.environ["TF_CONFIG"]
        os.environ.update(kept)


def one_weight(
    strategy: Any, initial: float = 1.0, replicas: int = 1
) -> tuple[Any, Callable[[], Any]]:
    """A variable, and a step by a gradient of 1 of a loss that is divided by so many replicas."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        weight = tf.Variable([initial], name="w")
        optimizer = keras.optimizers.SGD(RATE)

    def replica_step() -> None:
        optimizer.apply_gradients([(tf.constant([1.0]) / replicas, weight)])

    return weight, lambda: strategy.run(replica_step)
