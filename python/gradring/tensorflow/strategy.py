"""`CustomCollectiveStrategy`, the tf.distribute strategy."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradring import updates
from gradring.clusters import Place
from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.gradients import buckets, checks
from gradring.gradients.names import initial_value_of
from gradring.group import idle
from gradring.group.communicator import Communicator, at_new_group, open_groups
from gradring.group.require_equal import must_match, require_equal
from gradring.observe.observer import observe_worker
from gradring.tensorflow.cluster import placement, serving, tasks
from gradring.tensorflow.data import (
    absent_parts,
    batch_sizes,
    data_order,
    file_caches,
    input_time,
    iterators,
    made,
    sparse_order,
    static_batches,
    user_buffers,
)
from gradring.tensorflow.data.python_batches import PythonBatches
from gradring.tensorflow.files import whole_files
from gradring.tensorflow.graph import apart, compat, replica_step, retracing, session_order
from gradring.tensorflow.graph.broadcast_update import broadcast_update
from gradring.tensorflow.graph.cross_device_ops import RingCrossDeviceOps
from gradring.tensorflow.graph.dtypes import as_tensor
from gradring.tensorflow.graph.ops import broadcast_labelled
from gradring.tensorflow.graph.own_assignments import note_own_assignments
from gradring.tensorflow.graph.start_wait import eager_step
from gradring.tensorflow.keras import compat_keras, legacy_steps, own_means
from gradring.tensorflow.keras.moving_statistics import MovingStatistics
from gradring.tensorflow.rules import loaded, unreduced
from gradring.tensorflow.rules.factory import make
from gradring.tensorflow.seams.table import overrides, warn_of_newer
from gradring_start import watch_for_training_alone

DEFAULT_RULE = updates.AllReduce()


@functools.cache
def _install() -> None:
    """Installs the replacements in TensorFlow's datasets and variables, at the first strategy."""
    made.remember()
    iterators.let_leave()
    note_own_assignments(unreduced.note_assignment)
    loaded.watch_checkpoints()
    _let_variables_be_numbers()


def _let_variables_be_numbers() -> None:
    """Makes `int` and `float` accept variables of strategies, as they accept plain variables."""
    kind = compat.DistributedVariable
    for number in (int, float):
        name = f"__{number.__name__}__"
        if not hasattr(kind, name):
            setattr(kind, name, lambda self, number=number: number(self.numpy()))


class CustomCollectiveStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Synchronous training on several processes, whose gradients gradring reduces.

    Replaces `tf.distribute.MultiWorkerMirroredStrategy` in one line.

    Variables start with the chief's values; all ranks must create the same variables in the same
    order. The strategy starts no TensorFlow server and may be made at any time.

    A failed collective raises an exception of `gradring.errors`, such as `PeerLostError`, that
    names the rank to blame, also from `fit` or a `tf.function`. The exception is also a
    `tf.errors.AbortedError`, or a `tf.errors.DeadlineExceededError` after the communicator's
    timeout.

    Examples:
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
        ...     model.compile(keras.optimizers.SGD(0.25), "mse")
        >>> data = tf.data.Dataset.from_tensor_slices((tf.ones([8, 2]), tf.ones([8, 1]))).batch(4)
        >>> model.fit(data, epochs=2, verbose=0).history["loss"]  # each rank has 2 of 4 samples
        [0.625, 0.0390625]
    """

    #: True if the program knows of no replicas; see `stand_ins.given_strategy`.
    is_given = False

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        communicator: Communicator | None = None,
        devices: Sequence[str] | None = None,
        bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
        check_gradients: checks.CheckGradients | None = None,
        update: updates.Rule = DEFAULT_RULE,
        embeddings: checks.Embeddings = "rows",
        strict: bool = False,
    ) -> None:
        """Joins the group, unless `communicator` has done so.

        Args:
            cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver`. Default, and also
                if it names no tasks: the cluster that `gradring.init()` finds, such as from
                TF_CONFIG.
            communication_options: Ignored, accepted for compatibility.
            communicator: A `gradring.Communicator` to use; default: a new one.
            devices: The local devices, such as `["CPU:0", "CPU:1"]`, with one replica on each; the
                same number on every rank. Default, as for the strategy that this one replaces: all
                GPUs, or else one CPU.
            bucket_bytes: Bound on the gradients of one collective, in bytes; default 16 MiB.
            check_gradients: Treatment of gradients with NaN or infinity. "warn" logs rank, host and
                variable of such a gradient on its rank and on the chief, at most once a minute.
                "raise" ends the training on every rank with a `gradring.errors.AbortedError` of the
                same text. None (default) checks nothing. Only gradients that a Keras 3 optimizer
                reduces are checked. A check costs one pass over their memory.
            update: The rule by which optimizers of Keras 3 update variables, one of
                `gradring.updates`, the same on every rank; default `AllReduce()`. Page
                docs/choosing-an-update-rule.md compares the rules.
            embeddings: Treatment of rows with equal index in `tf.IndexedSlices` gradients, such as
                those of a word that occurs twice; the same on every rank. "rows" (default) passes
                the rows of all ranks to the optimizer, in rank order, as in one process. "sum"
                passes the sum of rows with equal index, which takes fewer bytes. SGD without
                clipping moves the weights equally in both cases, except for rounding. Adam and
                others do not, since they square each row.
            strict: True raises an error if the ranks do not train one model together, instead of a
                warning. Cases are a model outside of the scope, and weights with different initial
                or assigned values. Default False.

        Raises:
            gradring.errors.ConfigError: An argument has an unknown value, or `bucket_bytes` is not
                above 0. Or `check_gradients` and `update` cannot be combined, or one of them needs
                one local device. Or `cluster_resolver` and `communicator` contradict each other. Or
                `devices` is empty, names a device twice or one that does not exist, or has another
                length than on other ranks.
            gradring.errors.MismatchError: Another rank has another `update` or `embeddings`.
            gradring.errors.RendezvousError: The group could not be formed; names missing ranks.
        """
        _install()
        checks.check(check_gradients)
        checks.check_embeddings(embeddings)
        checks.check_communicator(communicator)
        buckets.check(bucket_bytes)
        cluster_resolver = tasks.unless_empty(cluster_resolver)
        served = None
        servers = tasks.servers_of(cluster_resolver) if communicator is None else None
        if servers is not None and servers.own is not None:
            serving.serve(update, servers)
        if isinstance(update, updates.ParameterServer):
            if communicator is not None:
                raise ConfigError(
                    f"communicator= and update={update}: workers of parameter servers form no "
                    "group; leave communicator= out"
                )
            served = tasks.served_of(cluster_resolver)
            communicator = tasks.alone()
        elif communicator is None:
            communicator = tasks.communicator_of(cluster_resolver)
        elif cluster_resolver is not None:
            tasks.check(cluster_resolver, communicator)
        open_groups.keep(communicator)
        retracing.watch(communicator)
        watch_for_training_alone()
        if strict:
            apart.be_strict(communicator)
        self.communicator = communicator
        #: Rule by which optimizers update the variables.
        self.update_rule = updates.agree(update, communicator)
        require_equal(communicator, {"embeddings": embeddings})
        must_match(communicator).update(update=repr(self.update_rule), embeddings=embeddings)
        place = served.place if served else Place(communicator.rank, communicator.world_size)
        # Not the parent's constructor, which starts a gRPC server and a coordination service.
        compat.Strategy.__init__(
            self,
            _Extended(
                self,
                cluster_resolver or tasks.resolver_of(place),
                communication_options or tf.distribute.experimental.CommunicationOptions(),
                devices,
                bucket_bytes,
                check_gradients,
                embeddings,
                served,
            ),
        )
        idle.note_formed(communicator)

        if served is not None:
            counted = weakref.WeakMethod(self.update_stats)
            observe_worker(
                communicator,
                Settings.from_environ(os.environ),
                served.place.rank,
                lambda: {} if (stats := counted()) is None else stats(),
            )

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are added up: all local devices of all workers.

        Examples:
            >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
            >>> global_batch = 32 * strategy.num_replicas_in_sync
            >>> global_batch  # on two workers of one device each
            64
        """
        frame = inspect.currentframe()
        own_means.note_read(self.extended, frame and frame.f_back)
        return int(super().num_replicas_in_sync)

    def scope(self) -> Any:
        """Variables made inside belong to the strategy; see `tf.distribute.Strategy.scope`."""
        compat_keras.repair()
        warn_of_newer(self.extended.rank)
        placement.know_servers()
        whole_files.guard()
        return super().scope()

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Runs `fn` once per local replica; see `tf.distribute.Strategy.run`.

        An eager call is one step, in the sense of `gradring.Communicator.step`. Inside a
        `tf.function`, the call of that function is the step.

        Args:
            fn: The function of one replica.
            args: Its positional arguments. A `tf.distribute.DistributedValues` gives each replica
                its own value.
            kwargs: Its keyword arguments, a dict; default: none.
            options: A `tf.distribute.RunOptions`; default: those of TensorFlow.

        Returns:
            The function's result; with several local replicas, a `tf.distribute.DistributedValues`.

        Examples:
            >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
            >>> with strategy.scope():
            ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(0.25)
            >>> def replica_step(y):
            ...     with tf.GradientTape() as tape:
            ...         loss = tf.reduce_sum((weight - y) ** 2) / 4  # by the global batch size
            ...     optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
            ...     return loss
            >>> @tf.function
            ... def train_step(batch):
            ...     losses = strategy.run(replica_step, args=(batch,))
            ...     return strategy.reduce("sum", losses, axis=None)
            >>> data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(4)
            >>> for batch in strategy.experimental_distribute_dataset(data):
            ...     print(train_step(batch).numpy(), weight.numpy())
            7.5 1.25
        """
        compat_keras.repair()
        with eager_step(self.communicator):
            return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """Reduces `value` over all replicas; see `tf.distribute.Strategy.reduce`.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, or its name.
            value: Result of `run`, or a nest of tensors. Every element is reduced, in as few
                collectives as possible.
            axis: None combines the replicas' values; a dimension is also reduced. MEAN over a
                dimension is exact for batches of different sizes. Scalars have no dimension and are
                combined as they are.

        Returns:
            The same structure of tensors.

        Examples:
            >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
            >>> losses = strategy.run(lambda: tf.range(1.0, 3.0 + rank))  # rank 1 has three samples
            >>> float(strategy.reduce("sum", losses, axis=0))
            9.0
            >>> round(float(strategy.reduce("mean", losses, axis=0)), 3)
            1.8
        """
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        if axis is None or all(_is_scalar(leaf) for leaf in tf.nest.flatten(value)):
            return super().reduce(reduce_op, value, None)
        return tf.nest.map_structure(
            lambda leaf: super(CustomCollectiveStrategy, self).reduce(
                reduce_op, leaf, None if _is_scalar(leaf) else axis
            ),
            value,
        )

    def broadcast_update(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs `fn(*args)` on the chief, and broadcasts its result and assignments to all replicas.

        Every rank must call it, eagerly or inside the same `tf.function`, but not inside of `run`.
        Every rank *traces* `fn`, as `tf.function` does, to learn its results and the variables that
        it assigns. Only the chief *executes* `fn`. So the TensorFlow ops in `fn` run once, while
        its plain Python code, such as reading a file, runs on every rank; use `broadcast_variables`
        for such code. Put frequent calls in a `tf.function`, which traces `fn` once.

        Args:
            fn: Takes `args` and returns a tensor, a nest of tensors and None, or nothing. It must
                create no variables and call no collective. Variables that it assigns, also in
                conditionals, loops and other functions, get the chief's values on every rank.
                Variables that it only reads stay as they are. Iterators, tables and other resources
                change on the chief only.
            *args: Tensors, nests of them, or Python values. The chief's values are used; the
                tensors' shapes and dtypes must be the same on every rank.

        Returns:
            The chief's result of `fn`, as tensors of any shape of known rank, and of any dtype of
            fixed width. No gradient flows through it.

        Raises:
            RuntimeError: Called inside `run`.
            TypeError: `fn` returns a value that is no tensor, or a string tensor, whose width is
                not fixed.
            ValueError: `fn` calls a collective, uses a tensor of the surrounding `tf.function` that
                is no argument, or returns a tensor of unknown rank.
            gradring.errors.AbortedError: On the other ranks, if one rank raises; contains that
                exception's text. Inside a `tf.function`, a chief that fails while *executing* `fn`
                raises its own error from that function. The others then raise a `PeerLostError`,
                `MismatchError` or `AbortedError` as soon as the chief's process ends, calls another
                collective or aborts, at the latest after the communicator's timeout.

        Examples:
            >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
            >>> with strategy.scope():
            ...     ema = tf.Variable(0.0)
            >>> own = tf.constant(1.0 + rank)
            >>> target = strategy.broadcast_update(lambda: ema.assign(0.5 * ema + 0.5 * own))
            >>> gradring.tensorflow.all_gather(tf.reshape(target, [1])).numpy()
            array([0.5, 0.5], dtype=float32)
            >>> ema.numpy().item()
            0.5
        """
        return broadcast_update(fn, args, self.communicator)

    def update_stats(self) -> dict[str, Any]:
        """Returns the counters of this worker's update rule since the start.

        Returns:
            An empty dict for other rules than `gradring.updates.ParameterServer`, and before the
            first step.

            Counters of this worker: ``version`` of its variables, ``pushes`` of gradients,
            ``dropped`` pushes, ``pulls``, ``unsettled`` pushes (neither applied nor dropped yet),
            ``waited_s`` in pulls, ``bytes_sent`` and ``bytes_received``, and ``reconnects``. The
            ``transport`` is that of the links to the servers.

            Counters of all workers' gradients are in ``servers``, since the servers were last
            restored. The first server sent them at most about a second ago. They are ``version``,
            ``updates``, ``pushes`` in updates, and ``queue``, the gradients that wait.
            ``staleness`` maps each staleness in versions to the number of these pushes.
            ``dropped_late``, ``dropped_overflow`` and ``dropped_lost`` count dropped gradients, and
            ``held_overflow`` those that had to wait for capacity in the queue.

            With several optimizers, counts are sums, and versions are those of the optimizer that
            was used first. ``optimizers`` has the counters of each, in the order of their first
            use.

        Examples:
            >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(
            ...     update=gradring.updates.ParameterServer()  # under gradring run -np 2 --ps 1
            ... )
            >>> with strategy.scope():
            ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(0.5)
            >>> def replica_step():
            ...     optimizer.apply_gradients([(tf.constant(1.0), weight)])
            >>> for step in range(3):
            ...     strategy.run(replica_step)
            >>> stats = strategy.update_stats()
            >>> stats["version"], stats["pushes"], stats["dropped"]
            (4, 3, 0)
            >>> strategy.leave()
        """
        return self.extended.updates.stats()  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Announces that this worker trains no more, so that no other worker waits for it.

        Only under `gradring.updates.ParameterServer` do workers wait for others without a
        collective. A worker leaves automatically when its program ends. A program that continues
        after its training, such as to evaluate, should call this first. It cannot continue to train
        afterwards. The worker's gradients that still wait in the servers' queue are dropped.

        Raises:
            gradring.errors.PeerLostError: A server could not be reached.

        Examples:
            >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(
            ...     update=gradring.updates.ParameterServer()  # under gradring run -np 2 --ps 1
            ... )
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
            ...     model.compile(keras.optimizers.SGD(0.25), "mse")
            >>> x, y = tf.ones([8, 2]), tf.ones([8, 1])
            >>> model.fit(x, y, verbose=0).history["loss"]
            [1.0]
            >>> strategy.leave()  # nobody waits for this worker while it evaluates
            >>> model.evaluate(x, y, verbose=0)
            0.25
        """
        self.extended.updates.leave()

    def _input_clock(self) -> Callable[[], float]:
        """Returns the clock of time spent waiting for datasets, for `gradring.Monitor`."""
        input_time.watch()
        return input_time.seconds

    def __deepcopy__(self, memo: Any) -> CustomCollectiveStrategy:
        # A strategy is this process's place in the group, which must stay unique.
        return self


@overrides(
    compat.CollectiveAllReduceExtended,
    "_batch_gather_to",
    "_batch_reduce_to",
    "_call_for_each_replica",
    "_create_variable",
    "_distribute_datasets_from_function",
    "_enable_check_health",
    "_experimental_distribute_dataset",
    "_gather_to_implementation",
    "_get_variable_creator_initial_value",
    "_initialize_local_devices",
    "_initialize_strategy",
    "_reduce_to",
    "_replica_ctx_all_reduce",
    "_scope",
    "_stop_check_health_thread",
    "_update_config_proto",
    "_use_merge_call",
)
class _Extended(compat.CollectiveAllReduceExtended):  # type: ignore[misc]
    """Implementation of the strategy; method names are tf.distribute's."""

    _num_workers: int
    _id_in_cluster: int

    # TensorFlow's failure detector stays off; the communicator has a better one.
    _enable_check_health = False

    #: True once the program has read the number of replicas.
    replicas_were_read = False
    #: True if `fit` takes a batch to build a model, as under `MultiWorkerMirroredStrategy`.
    builds_from_batch = False

    def __init__(
        self,
        strategy: CustomCollectiveStrategy,
        cluster_resolver: Any,
        communication_options: Any,
        devices: Sequence[str] | None,
        bucket_bytes: int,
        check_gradients: checks.CheckGradients | None,
        embeddings: checks.Embeddings,
        served: tasks.Served | None,
    ) -> None:
        self._communicator = communicator = strategy.communicator
        self._served = served
        self._bucket_bytes = bucket_bytes
        self._check_gradients = check_gradients
        self._embeddings: checks.Embeddings = embeddings
        self._chosen_devices = devices
        # A check of gradients would report statistics as gradients, so they must not join these.
        self.moving_statistics = MovingStatistics(join_gradients=check_gradients is None)
        self.python_batches = PythonBatches()
        super().__init__(strategy, cluster_resolver, communication_options)
        #: The update rule's hooks.
        rule, devices_here = strategy.update_rule, len(self.worker_devices)
        self.updates = make(
            rule, communicator, bucket_bytes, check_gradients, devices_here, served, embeddings
        )

    def _initialize_strategy(self, cluster_resolver: Any, devices: None) -> None:
        del devices  # the parent takes a resolver or devices, not both
        self._take_place(cluster_resolver)

        local_devices, self._local_device_type = self._initialize_local_devices(
            cluster_resolver, worker_device=""
        )
        self._num_devices_per_worker = len(local_devices)
        must_match(self._communicator)["local_devices"] = str(len(local_devices))
        self._worker_device = compat.canonical_device("/device:CPU:0")
        self._host_input_device = compat.host_input_device(self._worker_device)
        self._collective_keys = compat.CollectiveKeys()
        self._cross_device_ops = self._ring(local_devices)
        self._host_cross_device_ops = self._ring([self._worker_device])
        self._initialize_single_worker(local_devices)
        # Variables and ops go where TensorFlow puts them by default.
        self._default_device = None
        at_new_group(self._communicator, self.follow)

    def follow(self, communicator: Communicator) -> None:
        """Takes the rank and world size of a group that has formed again."""
        place = Place(communicator.rank, communicator.world_size)
        if place == Place(self._id_in_cluster, self._num_workers):
            return
        self._cluster_resolver = tasks.resolver_of(place)
        self._take_place(self._cluster_resolver)

    @property
    def servers(self) -> int:
        """Number of parameter servers."""
        return len(self._served.servers.addresses) if self._served is not None else 0

    @property
    def task(self) -> tuple[str, int]:
        """Type and index of this process in its cluster."""
        return self._task_type, self._task_id

    def _scope(self, strategy: CustomCollectiveStrategy) -> Any:
        if not strategy.is_given:
            return super()._scope(strategy)
        # Variables of a given program are plain TensorFlow variables.
        plain = tf.variable_creator_scope(lambda create, **kwargs: create(**kwargs))
        return compat.CurrentDistributionContext(strategy, plain)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        return placement.remember(super()._create_variable(next_creator, **kwargs))

    @contextlib.contextmanager
    def whole_data(self) -> Iterator[None]:
        """Gives a worker of parameter servers, inside the block, all data of each dataset."""
        before = self._num_workers, self._id_in_cluster
        if self._served is not None:
            self._num_workers, self._id_in_cluster = 1, 0
        try:
            yield
        finally:
            self._num_workers, self._id_in_cluster = before

    def _take_place(self, cluster_resolver: Any) -> None:
        communicator = self._communicator
        self._cluster_spec = compat.normalize_cluster_spec(cluster_resolver.cluster_spec())
        self._task_type = cluster_resolver.task_type
        self._task_id = cluster_resolver.task_id
        # Workers of parameter servers form no group, but still divide datasets.
        place = self._served.place if self._served else communicator
        self._num_workers = place.world_size
        self.rank = self._id_in_cluster = place.rank
        self._is_chief = place.rank == 0
        self._rpc_layer = cluster_resolver.rpc_layer

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        if self._chosen_devices is None:
            return super()._initialize_local_devices(cluster_resolver, worker_device)  # type: ignore[no-any-return]
        devices = tasks.checked_devices(self._chosen_devices, self._communicator)
        return devices, tf.DeviceSpec.from_string(devices[0]).device_type

    def _ring(self, devices: Any) -> RingCrossDeviceOps:
        return RingCrossDeviceOps(
            self._communicator,
            devices,
            self._bucket_bytes,
            self._check_gradients,
            self._embeddings,
        )

    @property
    def replicas(self) -> int:
        """Number of replicas on all workers, even if a given program sees one."""
        return self._num_workers * len(self.worker_devices)

    @property
    def _has_one_replica(self) -> bool:
        return len(self.worker_devices) == 1

    def _use_merge_call(self) -> bool:
        # One local replica needs no merge call, so collectives work inside conditionals and loops.
        return not self._has_one_replica

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if not self._has_one_replica:
            with replica_step.beginning():
                return super()._call_for_each_replica(fn, args, kwargs)
        context = compat.ReplicaContext(
            self._container_strategy(), replica_id_in_sync_group=self._id_in_cluster
        )
        args, kwargs = compat.select_replica(0, args), compat.select_replica(0, kwargs)
        device = tf.device(self.worker_devices[0])
        with device, context, legacy_steps.batch_of(fn, args), replica_step.beginning() as step:
            self.moving_statistics.forget()
            outputs = fn(*args, **kwargs)
            unreduced.check(step)
            self.moving_statistics.combine()
            return outputs

    def update(
        self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """See `tf.distribute.StrategyExtended.update`; refuses unreduced gradients."""
        unreduced.note_update(self._container_strategy(), var, args)
        if replica_step.is_outside():
            self.updates.note_assigned(var)
        if hasattr(var, "make_whole"):
            # A state under `Sharded` is no variable of `tf.distribute`.
            return fn(var, *compat.select_replica(0, args), **(kwargs or {}))
        return super().update(var, fn, args, kwargs, group)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        if replica_id != 0:
            return super()._get_variable_creator_initial_value(
                replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
            )

        def initial_value() -> Any:
            value = kwargs["initial_value"]
            with tf.device(device):
                value = value() if callable(value) else value
                if isinstance(value, compat.CheckpointInitialValue):
                    value = value.wrapped_value
                value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
                if self._communicator.world_size == 1 or compat_keras.makes_example():
                    return value
                if self._begins_alone(kwargs.get("synchronization")):
                    return value
                session_order.refuse("gradring's strategy")
                label = initial_value_of(kwargs.get("name"))
                return broadcast_labelled(value, 0, label, self._communicator)

        return initial_value

    def _begins_alone(self, synchronization: Any) -> bool:
        """Returns whether a variable begins with this rank's own value, without a broadcast.

        In an elastic job, variables that each replica keeps for itself, such as metrics, do. A rank
        that has joined makes them at a time when the other ranks already have theirs.
        """
        is_elastic = self._communicator.generation > 0
        return is_elastic and synchronization == tf.VariableSynchronization.ON_READ

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if not tf.nest.is_nested(value) or isinstance(value, tf.IndexedSlices):
            where = self._somewhere(destinations)
            return super()._reduce_to(reduce_op, value, where, options)
        flat = tf.nest.flatten(value)
        if not flat:
            return value
        results = self._batch_reduce_to(reduce_op, [(leaf, destinations) for leaf in flat], options)
        return tf.nest.pack_sequence_as(value, results)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        pairs = [(value, self._somewhere(where)) for value, where in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: Any, options: Any
    ) -> Any:
        if isinstance(value, tf.RaggedTensor) and tf.get_static_value(axis) == 0:
            parts = (value.flat_values, *value.nested_row_lengths())
            flat, *lengths = (
                self._gather_to_implementation(part, destinations, axis, options) for part in parts
            )
            return tf.RaggedTensor.from_nested_row_lengths(flat, lengths, validate=False)
        if not isinstance(value, compat.DistributedValues):
            value = as_tensor(value, "gather")
        destinations = self._somewhere(destinations)
        return super()._gather_to_implementation(value, destinations, axis, options)

    def _somewhere(self, destinations: Any) -> Any:
        """Returns the destinations, or this replica's device if they have no device.

        A destination is often a tensor, or a tensor's device. In a `tf.function` inside `run`, a
        tensor has no device yet, and TensorFlow refuses an empty device as a destination.
        """
        is_tensor = isinstance(destinations, (tf.Tensor, tf.IndexedSlices))
        device = destinations.device if is_tensor else destinations
        if isinstance(device, str) and not device:
            return self.worker_devices[0]
        return destinations

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if not self._has_one_replica:
            # A merge call combines the replicas of this process, then runs one collective.
            return compat.StrategyExtended._replica_ctx_all_reduce(self, reduce_op, value, options)
        if self._communicator.world_size == 1:
            return self._cross_device_ops.own(value)
        return self.moving_statistics.all_reduce(self._cross_device_ops, reduce_op, value, options)

    def _batch_gather_to(
        self, value_destination_pairs: Sequence[Any], axis: Any, options: Any = None
    ) -> Any:
        pairs = [(value, self._somewhere(where)) for value, where in value_destination_pairs]
        return super()._batch_gather_to(pairs, axis, options)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        if self._container_strategy().is_given:
            dataset = static_batches.divided_by_elements(dataset)
        dataset = sparse_order.ordered(absent_parts.as_none(dataset))
        ops = user_buffers.ops_of(dataset)
        dataset = data_order.agreed(user_buffers.owned(dataset, ops), self._communicator)
        dataset = self.python_batches.noted(dataset, ops, self._communicator)
        batch_sizes.check(dataset, self._communicator)
        dataset = file_caches.own(dataset, self._place_in_data)
        with batch_sizes.names_scalars(dataset, self._communicator):
            distributed = super()._experimental_distribute_dataset(dataset, options)
        if self._container_strategy().is_given:
            static_batches.keep(distributed, dataset, self.replicas)
        return distributed

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        def own(context: Any) -> Any:
            dataset = dataset_fn(context)
            dataset = user_buffers.owned(dataset, user_buffers.ops_of(dataset))
            return file_caches.own(dataset, self._place_in_data, "own")

        return super()._distribute_datasets_from_function(own, options)

    @property
    def _place_in_data(self) -> Place:
        return Place(self._id_in_cluster, self._num_workers)

    def _update_config_proto(self, config_proto: Any) -> Any:
        return config_proto

    def _stop_check_health_thread(self) -> None:
        pass

    def __deepcopy__(self, memo: Any) -> _Extended:
        return self


def _is_scalar(value: Any) -> bool:
    if isinstance(value, compat.DistributedValues):
        return all(_is_scalar(component) for component in value.values)
    return bool(tf.convert_to_tensor(value).shape.rank == 0)
