"""TensorFlow's own collectives, and gradring inside TensorFlow.

=========================  =====================================================================
``tensorflow-strategy``    `ReplicaContext.all_reduce` under `MultiWorkerMirroredStrategy`, RING
``tensorflow-raw``         the op below it, `CollectiveReduceV2`, tuned: four subdivisions
``gradring-op``            `gradring.tensorflow.all_reduce`
``gradring-strategy``      `ReplicaContext.all_reduce` under our `CustomCollectiveStrategy`
=========================  =====================================================================

Each is a `tf.function` that reads one variable and assigns the result to another. TensorFlow cannot
fold constants, since the source is a variable. The assignment is a side effect, so TensorFlow
cannot prune the op. It takes the op's output without a copy, and nothing is read back to numpy
during the measurement. A call returns after the assignment. So the measured time is that of the
collective and of the call of a `tf.function`, as in a training step. An output has new memory in
each iteration, because TensorFlow never overwrites a variable's value with a result.

Thread pools have TensorFlow's default sizes: all cores for every rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any

from numpy.typing import NDArray

from gradring.group.communicator import Communicator
from gradring.launch.ranks import THREAD_VARIABLES, tf_config_of
from gradring.machine import packages
from gradring.tools.bench.systems.agree import agree_on_addresses, agree_on_ports
from gradring.tools.bench.systems.system import LocalReduction, System, missing_module
from gradring.tools.bench.values import Problem

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
FINAL_OPS = {"sum": "Id", "mean": "Div"}
#: Different from all group keys of strategies, which are small.
GROUP_KEY = 1 << 20
#: Subdivisions of a tensor per device: about twice as fast at 100 MiB as the default, and not
#: slower for smaller sizes.
SUBDIVISIONS = 4


def missing() -> str | None:
    """Returns how to install TensorFlow if no build of it is installed."""
    return missing_module("tensorflow", "tensorflow", packages.advice(["tensorflow"]))


def version() -> str:
    """Returns the version of the installed package, which has one of two names."""
    for package in ("tensorflow", "tensorflow-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"tensorflow {metadata.version(package)}"
    return "tensorflow"


def refusal(dtype: str, op: str, world_size: int, hosts: int) -> str | None:
    """Refuses dtypes and ops that TensorFlow lacks, and means that it rounds differently."""
    if dtype not in DTYPES:
        return f"TensorFlow does not all-reduce {dtype}; choose one of {', '.join(DTYPES)}"
    if op not in FINAL_OPS:
        return f"TensorFlow's strategy has no all-reduce with op {op}; choose sum or mean"
    if op == "mean" and (world_size & (world_size - 1) or dtype.startswith("int")):
        return (
            f"TensorFlow rounds the mean of {world_size} ranks in {dtype} differently, so that "
            "no exact expectation serves both; choose --op sum"
        )
    return None


def open_systems(groups: Sequence[Communicator], closing: contextlib.ExitStack) -> Sequence[System]:
    """Starts TensorFlow's collective server on every rank, before any use of TensorFlow."""
    comm = groups[0]
    configure(comm)
    import tensorflow as tf

    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    device = f"/job:worker/replica:0/task:{comm.rank}/device:CPU:0"
    reduction = partial(partial, _Reduction, device)
    # Groups with checksums come last, so reversed order keeps those without.
    by_transport = {group.stats()["transport"]: group for group in reversed(groups)}
    return [
        System("tensorflow-strategy", "grpc", reduction(_strategy_all_reduce(strategy))),
        System("tensorflow-raw", "grpc", reduction(_raw_all_reduce(comm, device))),
        *(system for own in by_transport.values() for system in _own_systems(own, reduction)),
    ]


def _own_systems(
    comm: Communicator, reduction: Callable[[Callable[[Any, str], Any]], Any]
) -> list[System]:
    """Returns gradring's op and strategy over the transport of a group."""
    import gradring.tensorflow

    def own_op(tensor: Any, op: str) -> Any:
        return gradring.tensorflow.all_reduce(tensor, op=op, communicator=comm)

    def own_algorithm() -> str:
        return comm.stats()["algorithm"]

    strategy = gradring.tensorflow.CustomCollectiveStrategy(communicator=comm)
    transport, own = comm.stats()["transport"], _strategy_all_reduce(strategy)
    return [
        System("gradring-op", transport, reduction(own_op), own_algorithm),
        System("gradring-strategy", transport, reduction(own), own_algorithm),
    ]


class _Reduction(LocalReduction):
    def __init__(
        self, device: str, all_reduce: Callable[[Any, str], Any], problem: Problem
    ) -> None:
        import tensorflow as tf

        super().__init__(problem.expected())
        source = problem.source()
        with tf.device(device):
            self._spoiled = tf.zeros(source.shape, source.dtype)
            self._target = tf.Variable(self._spoiled)
            input_variable = tf.Variable(source)

        def step() -> None:
            with tf.device(device):
                self._target.assign(all_reduce(input_variable.read_value(), problem.op))

        self._step = tf.function(step, autograph=False)

    def reset(self) -> None:
        self._target.assign(self._spoiled)

    def run(self) -> None:
        self._step()

    def result(self) -> NDArray[Any]:
        return self._target.numpy()  # type: ignore[no-any-return]


def configure(comm: Communicator) -> None:
    """Sets ``TF_CONFIG`` with free ports of rank 0's choice, and the default thread pools."""
    places = zip(agree_on_addresses(comm), agree_on_ports(comm, comm.world_size), strict=True)
    workers = [f"{address}:{port}" for address, port in places]
    os.environ["TF_CONFIG"] = tf_config_of(workers, comm.rank)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for variable in THREAD_VARIABLES:
        os.environ.pop(variable, None)


def _strategy_all_reduce(strategy: Any) -> Callable[[Any, str], Any]:
    import tensorflow as tf

    def all_reduce(tensor: Any, op: str) -> Any:
        def replica(value: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp[op.upper()], value)

        return strategy.run(replica, args=(tensor,))

    return all_reduce


def _raw_all_reduce(comm: Communicator, device: str) -> Callable[[Any, str], Any]:
    import tensorflow as tf

    with tf.device(device):
        token = tf.Variable(0)
    instances = iter(range(1, 1 << 30))

    def all_reduce(tensor: Any, op: str) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=comm.world_size,
            group_key=GROUP_KEY,
            instance_key=next(instances),
            ordering_token=[token.handle],
            merge_op="Add",
            final_op=FINAL_OPS[op],
            communication_hint="ring",
            max_subdivs_per_device=SUBDIVISIONS,
        )

    return all_reduce
