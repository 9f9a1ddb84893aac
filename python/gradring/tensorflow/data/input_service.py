"""tf.data service of the job: ``gradring run --input-workers K`` starts it, and datasets use it.

The chief registers a dataset, and all ranks read from one job of the service, first come, first
served. The dispatcher deals out the elements of the dataset's sources, and each input worker runs
what follows on those that it gets.

How long an input worker has taken for an element travels with it: a clock is read before and
after. The ranks add it up, so that a `gradring.Monitor` can tell what they would have waited for.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from typing import Any

import tensorflow as tf

from gradring.config.parse import is_loopback
from gradring.errors import ConfigError
from gradring.group.communicator import Communicator
from gradring.group.require_equal import require_equal
from gradring.group.together import agreed
from gradring.observe.observer import observer_of
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of

_CHIEF = 0
_SERVICE = tf.data.experimental.service
_POLICY = tf.data.experimental.ExternalStatePolicy
#: As many ticks as nobody lives to see; the dispatcher deals out the first of the two.
_MANY = 2**40
_PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
#: What means something else where each input worker has a part of the elements. In functions, as of
#: `interleave`, one of them has all.
_OF_ALL_ELEMENTS = {
    "ScanDataset": "scan",
    "ShardDataset": "shard",
    "SkipDataset": "skip",
    "TakeDataset": "take",
    "TakeWhileDataset": "take_while",
    "UniqueDataset": "unique",
    "WindowDataset": "window",
    "ZipDataset": "zip or enumerate",
}

_calls = itertools.count()
#: Seconds that input workers have taken for what the ranks of a communicator have read here.
_totals: weakref.WeakKeyDictionary[Communicator, tf.Variable] = weakref.WeakKeyDictionary()


def input_service() -> str | None:
    """Where the tf.data service of this job is.

    Returns:
        ``grpc://host:port``, the ``service`` of ``tf.data.experimental.service.distribute`` and the
        like; None without ``gradring run --input-workers``.

    Examples:
        >>> service = gradring.tensorflow.input_service()
        >>> dataset = tf.data.Dataset.range(4).batch(2)
        >>> if service is not None:
        ...     distribute = tf.data.experimental.service.distribute
        ...     dataset = dataset.apply(distribute("parallel_epochs", service))
        >>> print(service)  # with gradring run --input-workers 2: grpc://127.0.0.1:...
        None
    """
    return os.environ.get("GRADRING_INPUT_SERVICE") or None


def distribute_input(
    dataset: tf.data.Dataset, of: tf.distribute.Strategy | Communicator, *, name: str = "input"
) -> tf.data.Dataset:
    """Has the input workers of the job read a dataset; every rank must call it.

    Every element goes to one rank in each epoch, in any order, unless an input worker is lost: what
    it was reading is missing then. ``batch`` in the pipeline means what it means without input
    workers: the global batch for a dataset that the strategy divides. Each input worker has a last
    batch of its own, which may be smaller. The chief's dataset counts on all ranks. An epoch begins
    with an iterator, so all ranks must make equally many of the result.

    Without ``gradring run --input-workers`` there is no service, and the ranks read by themselves:
    the same program runs with it and without.

    Args:
        dataset: What is read, by TensorFlow's operations only. Its sources must be such that can be
            dealt out: ``range``, ``from_tensor_slices``, ``list_files`` and what follows them.
            They may not count or compare elements: input workers have different ones. So ``take``,
            ``take_while``, ``skip``, ``shard``, ``zip``, ``enumerate``, ``window``, ``scan`` and
            ``unique`` have their place behind this function.
        of: The strategy that divides the result by ``fit`` or ``experimental_distribute_dataset``;
            or, for a loop without a strategy, the `gradring.Communicator` of its ranks.
        name: For messages of TensorFlow.

    Returns:
        A dataset of the same elements. Without a service, and for a communicator, it is every n-th
        element of `dataset` for n ranks.

    Raises:
        gradring.errors.ConfigError: `of` is neither; or `dataset` calls Python, which input workers
            do not have, or counts or compares elements; or the service does not take it.
        gradring.errors.MismatchError: Another rank's elements are of other types or shapes.
        TypeError: `dataset` is none.

    Examples:
        >>> dataset = tf.data.Dataset.range(6).batch(2)
        >>> own = gradring.tensorflow.distribute_input(dataset, comm)
        >>> [batch.numpy().tolist() for batch in own]  # no input workers: every second one
        [[0, 1], [4, 5]]
    """
    communicator = of if isinstance(of, Communicator) else communicator_of(of)
    if communicator is None:
        raise ConfigError(
            f"distribute_input needs a CustomCollectiveStrategy or a gradring.Communicator, not "
            f"{of!r}"
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"distribute_input: {type(dataset).__name__} is no tf.data.Dataset; give one"
        )
    service = input_service()
    own = {"input service": service or "none", "elements": str(dataset.element_spec)}
    remedy = "call distribute_input on every rank with the same dataset"
    require_equal(communicator, own, remedy=remedy)
    if service is None:
        is_divided = communicator is not of
        return dataset if is_divided else _share(dataset, communicator)
    timed = _timed(dataset)
    job = f"{name}-{_job_of(of)}"
    with agreed(communicator, "register", "a dataset with the input workers", ConfigError):
        if communicator.rank == _CHIEF:
            check(dataset)
            _register(timed, service, job)
    job = communicator.broadcast_object(job, root=_CHIEF)
    # A job has its elements once for all who read from it, so the strategy deals out no more.
    read = _SERVICE.from_dataset_id(
        _SERVICE.ShardingPolicy.DYNAMIC,
        service,
        tf.constant(job),
        element_spec=timed.element_spec,
        job_name=job,
    )
    return read.map(_adding_up(communicator))


def _share(dataset: tf.data.Dataset, communicator: Communicator) -> tf.data.Dataset:
    return dataset.shard(communicator.world_size, communicator.rank)


def _job_of(of: Any) -> str:
    """What tells a job of the service from others of its name."""
    # Workers of parameter servers form no group in which one could say a name to the others.
    is_served = getattr(getattr(of, "extended", None), "servers", 0) > 0
    return str(next(_calls)) if is_served else secrets.token_hex(4)


def _register(dataset: tf.data.Dataset, service: str, dataset_id: str) -> None:
    """Tells the service, unless it knows a dataset of this name, as of another worker."""
    address = service.rpartition("://")[2]
    compression = None if is_loopback(address) else "AUTO"
    try:
        _SERVICE.register_dataset(service, dataset, compression, dataset_id)
    except tf.errors.OpError as error:
        raise ConfigError(f"tf.data service at {service} does not take it: {error}") from error


def check(dataset: tf.data.Dataset, *, what: str | None = None) -> None:
    """Finds what input workers do not have, would do each for itself, or would wait for for ever.

    Args:
        dataset: What they would read.
        what: The function that gives it to them, for a message that stands alone; None: it is
            `distribute_input`, whose caller knows that.

    Raises:
        gradring.errors.ConfigError: There is such a thing; the message names it.
    """
    it = "it" if what is None else f"{what}: the dataset"
    behind = what or "distribute_input"
    graph = compat.graph_of(dataset)
    functions = (function.node_def for function in graph.library.function)
    ops = {node.op for node in itertools.chain(graph.node, *functions)}
    if any(op.startswith("DataServiceDataset") for op in ops):
        raise ConfigError(f"{it} is read by input workers already; give what they read")
    if found := sorted(ops & _PYTHON_OPS):
        raise ConfigError(
            f"{it} calls Python ({', '.join(found)}, of tf.py_function, tf.numpy_function or "
            "Dataset.from_generator), and input workers run TensorFlow's operations only; do that "
            f"part behind {behind}, or before the program starts"
        )
    own = _OF_ALL_ELEMENTS
    if found := sorted({own[node.op] for node in graph.node if node.op in own}):
        raise ConfigError(
            f"{it} has {', '.join(found)}, and each input worker would do that with its own "
            f"elements alone; do that part behind {behind}, or on what the pipeline is made from "
            "(from_tensor_slices((images, labels)) for zip)"
        )


# How long input workers take


def _timed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Each element between the times at which it was asked for and was there."""
    ticks = tf.data.Dataset.range(_MANY).flat_map(_endless).map(_now)
    timed = tf.data.Dataset.zip((ticks, dataset, ticks))
    options = tf.data.Options()
    # Clocks have a state; TensorFlow would warn of it.
    if dataset.options().experimental_external_state_policy is None:
        options.experimental_external_state_policy = _POLICY.IGNORE
    return timed.with_options(options)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _endless(_: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.range(_MANY)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _now(_: tf.Tensor) -> tf.Tensor:
    return tf.timestamp()


def _adding_up(communicator: Communicator) -> Any:
    """Takes the times off elements, and has monitors of the communicator see their sum."""
    observer = observer_of(communicator)
    total = _totals.get(communicator)
    if total is None:
        total = compat.plain_variable(0.0, "gradring_made_s", tf.float64)
        _totals[communicator] = total
        observer.input_made_s = lambda: float(total)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def add(begun: tf.Tensor, element: Any, made: tf.Tensor) -> Any:
        tf.raw_ops.AssignAddVariableOp(resource=total.handle, value=made - begun)
        return element

    return add
