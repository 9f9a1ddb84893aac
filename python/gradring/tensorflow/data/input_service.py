"""tf.data service of the job: ``gradring run --input-workers K`` starts it, and datasets use it.

The chief registers a dataset, and all ranks read from one job of the service, first come, first
served. The dispatcher deals out the elements of the dataset's sources. Each input worker runs the
rest of the pipeline on the elements that it gets.

Each element travels with two readings of a clock, from before and after the input worker made it.
The ranks add up the differences. A `gradring.Monitor` uses the sum: the time that the ranks would
have needed to make the elements themselves.
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
#: Size of each of two nested ranges of clock readings, in practice endless. The dispatcher deals
#: out the outer one.
_MANY = 2**40
#: Ops with a different meaning if each input worker has a part of the elements. Functions, such as
#: that of `interleave`, can use these ops: one input worker has all elements of an inner dataset.
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
#: Seconds that input workers needed for the elements that this process read, by communicator.
_totals: weakref.WeakKeyDictionary[Communicator, tf.Variable] = weakref.WeakKeyDictionary()


def input_service() -> str | None:
    """Returns the address of this job's tf.data service.

    Returns:
        ``grpc://host:port``, for the argument ``service`` of functions such as
        ``tf.data.experimental.service.distribute``; None without ``gradring run --input-workers``.

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
    """Makes the input workers of the job read a dataset; every rank must call it.

    Every element goes to one rank in each epoch, in any order. If an input worker is lost, the
    elements that it was reading are missing. ``batch`` in the pipeline keeps its meaning: it is the
    global batch for a dataset that the strategy divides. Each input worker has a last batch of its
    own, which can be smaller. All ranks read the chief's dataset. An epoch begins with an iterator,
    so all ranks must make equally many iterators over the result.

    Without ``gradring run --input-workers`` there is no service, and the ranks read the dataset
    themselves. So the same program runs with input workers and without.

    Args:
        dataset: The dataset to read. It can use only TensorFlow's operations. The service must be
            able to deal out its sources: ``range``, ``from_tensor_slices`` or ``list_files``, and
            the steps that follow. The pipeline must not count or compare elements, because each
            input worker has different ones. Apply ``take``, ``take_while``, ``skip``, ``shard``,
            ``zip``, ``enumerate``, ``window``, ``scan`` and ``unique`` to the result instead.
        of: The strategy that divides the result by ``fit`` or ``experimental_distribute_dataset``;
            or, for a loop without a strategy, the `gradring.Communicator` of its ranks.
        name: Name of the job in TensorFlow's messages.

    Returns:
        A dataset of the same elements. If there is no service and `of` is a communicator, it has
        every n-th element of `dataset` for n ranks.

    Raises:
        gradring.errors.ConfigError: `of` is neither; or `dataset` calls Python, which input workers
            do not have, or counts or compares elements; or the service refuses the dataset.
        gradring.errors.MismatchError: Another rank's elements are of other types or shapes.
        TypeError: `dataset` is no `tf.data.Dataset`.

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
    # The readers of a job share its elements, so the strategy must not divide them again.
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
    """Returns a suffix that distinguishes a job of the service from others of the same name."""
    # Workers of parameter servers form no group that could share a random suffix.
    is_served = getattr(getattr(of, "extended", None), "servers", 0) > 0
    return str(next(_calls)) if is_served else secrets.token_hex(4)


def _register(dataset: tf.data.Dataset, service: str, dataset_id: str) -> None:
    """Registers a dataset with the service, unless another worker has registered this name."""
    address = service.rpartition("://")[2]
    compression = None if is_loopback(address) else "AUTO"
    try:
        _SERVICE.register_dataset(service, dataset, compression, dataset_id)
    except tf.errors.OpError as error:
        raise ConfigError(f"tf.data service at {service} does not take it: {error}") from error


def check(dataset: tf.data.Dataset, *, caller: str | None = None) -> None:
    """Refuses a dataset that input workers cannot read as the ranks would.

    Input workers run no Python code. Each would count and compare only its own elements. They would
    wait for ever for a dataset that reads from input workers itself.

    Args:
        dataset: The dataset that input workers would read.
        caller: Name of the calling function, for a message that stands alone. None: the caller is
            `distribute_input`, which adds its name to the message.

    Raises:
        gradring.errors.ConfigError: The dataset has such a part; the message names it.
    """
    it = "it" if caller is None else f"{caller}: the dataset"
    behind = caller or "distribute_input"
    graph = compat.graph_of(dataset)
    ops = compat.ops_in(graph)
    if any(op.startswith("DataServiceDataset") for op in ops):
        raise ConfigError(f"{it} is read by input workers already; give what they read")
    if found := sorted(ops & compat.PYTHON_OPS):
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
    """Puts each element between two clock readings: from before and after it was made."""
    ticks = tf.data.Dataset.range(_MANY).flat_map(_endless).map(_now)
    timed = tf.data.Dataset.zip((ticks, dataset, ticks))
    options = tf.data.Options()
    # TensorFlow would warn that clocks have a state.
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
    """Makes a function that takes clock readings off elements and sums them up for monitors."""
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
