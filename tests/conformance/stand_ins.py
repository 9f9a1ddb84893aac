"""Stand-ins that a test file of TensorFlow finds for TensorFlow's test runner and strategy.

TensorFlow's runner starts the workers itself, and sends each test to them. Here the workers run
already, each runs the whole file, and each takes itself for one of that runner's workers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    combinations,
    cross_device_ops,
    multi_process_lib,
    multi_process_runner,
    multi_worker_test_base,
    strategy_combinations,
)
from tensorflow.python.eager import test as eager_test
from tensorflow.python.platform import googletest
from tensorflow.python.platform import test as platform_test

import gradring
from conformance.worker import World
from gradring.machine.ports import free_ports


def install(world: World, run_tests: Callable[[], None]) -> None:
    """Puts all stand-ins in place, before the test file is executed."""

    def main(*args: Any, **kwargs: Any) -> None:
        run_tests()

    for module in (googletest, platform_test, eager_test, tf.test):
        module.main = main
    multi_process_lib.test_main = main
    multi_process_runner.get_barrier = lambda: world
    multi_process_runner.MultiProcessPoolRunner = _pool_of(world)
    multi_worker_test_base.pick_unused_port = lambda: free_ports(1)[0]
    # Pickles functions for the workers of TensorFlow's runner.
    dill = ModuleType("dill")
    dill.register = lambda _: lambda function: function  # type: ignore[attr-defined]
    sys.modules["dill"] = dill
    combinations._running_in_worker = True
    if "tf_keras" in world.file:
        _arrange_tf_keras()
    if world.widened:
        _widen()
    if world.size > 1:
        describe_cluster(world, {"chief": 1, "worker": world.size - 1})
    if world.strategy == "gradring":
        _install_gradring(world)
    elif any("MultiWorkerMirrored" in test for test in world.tests):
        # Its server must start before anything else uses TensorFlow.
        world.before_first_test = lambda: (
            strategy_combinations.multi_worker_mirrored_2x1_cpu.strategy
        )


def describe_cluster(world: World, sizes: Mapping[str, int]) -> None:
    """Sets TF_CONFIG to this worker's place in a cluster of such jobs."""
    addresses = iter(world.addresses)
    cluster = {job: [next(addresses) for _ in range(size)] for job, size in sizes.items() if size}
    places = [(job, index) for job in cluster for index in range(len(cluster[job]))]
    job, index = places[world.rank]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": job, "index": index}, "rpc_layer": "grpc"}
    )


def _widen() -> None:
    """Adds the multi-worker strategy to the lists of strategies that lack it."""
    keras = sys.modules.get("tf_keras.src.distribute.strategy_combinations")
    for module in filter(None, (strategy_combinations, keras)):
        for name in ("all_strategies", "multidevice_strategies", "strategies_minus_tpu"):
            strategies = getattr(module, name)
            if strategy_combinations.multi_worker_mirrored_2x1_cpu not in strategies:
                strategies.append(strategy_combinations.multi_worker_mirrored_2x1_cpu)


def _arrange_tf_keras() -> None:
    """Lets imports written for tf_keras' checkout find the installed package."""
    sys.modules["tf_keras.distribute"] = importlib.import_module("tf_keras.src.distribute")
    importlib.import_module("tf_keras.src.distribute.strategy_combinations")
    for name in ("layers", "optimizers.legacy"):
        public = importlib.import_module(f"tf_keras.{name}")
        source = importlib.import_module(f"tf_keras.src.{name}")
        for module in pkgutil.iter_modules(source.__path__):
            if not hasattr(public, module.name):
                found = importlib.import_module(f"{source.__name__}.{module.name}")
                setattr(public, module.name, found)


def _pool_of(world: World) -> type:
    class PoolRunner:
        """Runs a function on all workers of a pool: here, on this one."""

        def __init__(self, cluster_spec: Mapping[str, Sequence[str]], **_: Any) -> None:
            self._sizes = {job: len(addresses) for job, addresses in cluster_spec.items()}

        def run(self, fn: Callable[..., Any], args: Any = None, kwargs: Any = None) -> list[Any]:
            if sum(self._sizes.values()) != world.size:
                return []  # the pool of other tests of the same class
            describe_cluster(world, self._sizes)
            return [fn(*(args or ()), **(kwargs or {}))]

    return PoolRunner


def _install_gradring(world: World) -> None:
    from gradring.gradients.buckets import DEFAULT_BUCKET_BYTES
    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.graph.cross_device_ops import RingCrossDeviceOps

    class Strategy(CustomCollectiveStrategy):
        """Ours, whose communicator is closed when the test has ended."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            world.after_test.append(self.communicator.close)

    class LikeRing(type):
        """TensorFlow asks of our strategy's operations, too, whether they are of its class."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, RingCrossDeviceOps)

    class Ring(RingCrossDeviceOps, metaclass=LikeRing):
        """Ours, made as TensorFlow's is."""

        def __init__(self, devices: Sequence[str], group_size: int, options: Any) -> None:
            assert world.size * len(devices) == group_size
            # The test has a TensorFlow server of its own at the addresses of TF_CONFIG.
            communicator = gradring.init(
                rank=world.rank, world_size=world.size, rendezvous=world.rendezvous
            )
            world.after_test.append(communicator.close)
            super().__init__(communicator, devices, DEFAULT_BUCKET_BYTES)

    def session(kwargs: Any) -> Any:
        # TensorFlow's connects to a server, which gradring does not start.
        return contextlib.nullcontext() if tf.executing_eagerly() else tf.compat.v1.Session()

    Strategy.__name__ = "CollectiveAllReduceStrategy"  # some tests ask for the name
    collective_all_reduce_strategy.CollectiveAllReduceStrategy = Strategy
    strategy_combinations.CollectiveAllReduceStrategy = Strategy
    cross_device_ops.CollectiveAllReduce = Ring
    combinations._multi_worker_session = session
