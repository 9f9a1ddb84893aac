"""Iterators over datasets that a program can leave before their end, without a crash or a delay.

The iterator of TensorFlow's strategies reads ahead in a thread. When it is destroyed, it first
releases its dataset and then waits for the thread. The thread asks that same dataset for the number
of tensors in an element, and the process ends by SIGSEGV. Keras leaves an iterator whenever it has
built a model from its first batch. Other programs do so by `break`, `steps_per_epoch` or an
exception.

Almost every dataset is also owned by the dataset or iterator that reads from it, so it lives until
the thread has ended. Only a dataset of options is not, and TensorFlow puts one in front. So this
module puts another dataset before it. The iterator of the strategies also traces six functions each
time one is made, and Keras makes two in an epoch. On a single CPU, the case of nearly all ranks, a
plain iterator takes its place.

Every iterator also has a thread that tunes its datasets, at intervals that double from 10 ms to a
minute. When the iterator is destroyed, it wakes that thread before it sets the flag that ends the
thread. If the thread is quick, or the machine busy, the thread misses the flag and sleeps until the
end of its interval, and the program waits for it. So another thread destroys iterators, and the
program waits only `PATIENCE_S` for it: a rank of an elastic job that has lost another rank has no
more time. The process waits for the rest at its end. Otherwise a thread that returned from
TensorFlow during the end of the interpreter would be unwound, and the process would end by SIGABRT.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import inspect
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Longest wait for the end of an iterator; it takes a few ms, unless the tuning thread sleeps.
PATIENCE_S = 0.1
#: Longest wait at the end of the process: the longest sleep of a tuning thread, and a little more.
PATIENCE_AT_EXIT_S = 65.0

#: A lock for each iterator that is being destroyed, held until it has ended.
_ending: set[_thread.LockType] = set()


class _Exit:
    """Flag that is set when the end of the process begins."""

    has_begun = False


@functools.cache
def let_leave() -> None:
    """Replaces the constructors of iterators, also of those of TensorFlow's own strategies.

    Calls after the first one do nothing.
    """
    compat.replace(
        {"OwnedIterator.__init__": _init_one, "OwnedMultiDeviceIterator.__init__": _init_several}
    )
    atexit.register(_await_ends)
    # A forked child has no thread that would release these locks.
    os.register_at_fork(after_in_child=_ending.clear)


def _init_one(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    _end_aside(self)


def _init_several(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    asked = inspect.signature(original).bind(self, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    # Without a dataset, the object wraps an existing iterator.
    if given["dataset"] is not None and _are_one_processor(given["devices"]):
        _read_plainly(**given)
        return
    if given["dataset"] is not None:
        given["dataset"] = _Kept(given["dataset"])
    original(*asked.args, **asked.kwargs)
    _end_aside(self)


def _are_one_processor(devices: Sequence[str]) -> bool:
    return len(devices) == 1 and "CPU" in devices[0].upper() and tf.executing_eagerly()


def _read_plainly(
    self: Any,
    dataset: Any,
    devices: Sequence[str],
    max_buffer_size: int,
    prefetch_buffer_size: int,
    source_device: str,
    **_: Any,
) -> None:
    """Makes ``self`` read its dataset through a plain iterator, as without a strategy."""
    ahead = max_buffer_size + prefetch_buffer_size if prefetch_buffer_size else 0
    options = tf.data.Options()
    options.experimental_distribute.num_devices = len(devices)
    if ahead:
        dataset = dataset.prefetch(ahead)
    else:
        options.experimental_optimization.inject_prefetch = False
    dataset = dataset.with_options(options)
    self._element_spec = dataset.element_spec
    self._devices = devices
    self._source_device = source_device
    with tf.device(source_device):
        # A function that takes the iterator also takes this resource.
        self._multi_device_iterator_resource = tf.raw_ops.AnonymousMultiDeviceIteratorV3(
            devices=devices, **compat.structure_of(dataset)
        )
        self._device_iterators = [iter(dataset)]


class _Kept(compat.UnchangedDataset):  # type: ignore[misc]
    """The same dataset, whose options are followed by a dataset that takes all elements."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, compat.variant_of(dataset))

    def with_options(self, *args: Any, **kwargs: Any) -> Any:
        return super().with_options(*args, **kwargs).take(-1)


def _end_aside(iterator: Any) -> None:
    """Makes another thread destroy an iterator's parts when the iterator is garbage."""
    if tf.executing_eagerly():  # a graph destroys its own iterators
        weakref.finalize(iterator, _end, vars(iterator)).atexit = False


def _end(attributes: dict[str, Any]) -> None:
    if _Exit.has_begun:
        return
    is_ending = _thread.allocate_lock()
    is_ending.acquire()

    def end() -> None:
        try:
            attributes.clear()
        finally:
            _ending.discard(is_ending)
            is_ending.release()

    _ending.add(is_ending)
    try:
        # `threading` takes a lock. Garbage collection can interrupt code that holds this lock.
        _thread.start_new_thread(end, ())
    except RuntimeError:  # the system has no thread left, or the process ends
        _ending.discard(is_ending)
        return
    is_ending.acquire(timeout=PATIENCE_S)


def _await_ends() -> None:
    _Exit.has_begun = True
    until = time.monotonic() + PATIENCE_AT_EXIT_S
    for is_ending in tuple(_ending):
        is_ending.acquire(timeout=max(0.0, until - time.monotonic()))
