"""Iterators over datasets that can be left before their end, at once.

The iterator that TensorFlow's strategies use reads ahead in a thread. When it goes, it first lets
go of its dataset and then waits for the thread, which asks that very dataset how many tensors an
element has: the process ends by SIGSEGV. Keras leaves an iterator whenever it has built a model
from its first batch; other programs do so by `break`, `steps_per_epoch` or an exception.

Every dataset but one is also owned by what reads from it, so it lives until the thread has ended.
The exception is a dataset of options, and TensorFlow puts one in front. So another goes before it.
That iterator also traces six functions each time one is made, which Keras does twice an epoch. For
one processor, which is what nearly all ranks have, a plain iterator takes its place.

Every iterator also has a thread that tunes its datasets, at intervals that double from 10 ms to a
minute. When the iterator goes, it wakes that thread before it notes that the thread is to end. If
the thread is quick, or the machine busy, it sleeps on to the end of its interval, and a program
that drops the iterator waits for it. So another thread ends iterators, and the program waits for
that a little only: a rank of an elastic job that has lost another one has no time for it. The rest
of the wait is at the end of the process, because a thread that comes back from TensorFlow while the
interpreter ends is unwound there, which ends the process by SIGABRT.
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

#: Ending an iterator takes a few ms, unless its thread sleeps.
PATIENCE_S = 0.1
#: The longest sleep of such a thread, and a little more.
PATIENCE_AT_EXIT_S = 65.0

#: Held until an iterator has ended: those that are ending.
_ending: set[_thread.LockType] = set()


class _Exit:
    """Whether the process ends."""

    has_begun = False


@functools.cache
def let_leave() -> None:
    """Mends the iterators that are made from now on, those of TensorFlow's own strategies too.

    Calls after the first one do nothing.
    """
    compat.replace(
        {"OwnedIterator.__init__": _init_one, "OwnedMultiDeviceIterator.__init__": _init_several}
    )
    atexit.register(_await_ends)
    # The threads are the parent's.
    os.register_at_fork(after_in_child=_ending.clear)


def _init_one(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    _end_aside(self)


def _init_several(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    asked = inspect.signature(original).bind(self, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    # Without a dataset, it stands for an iterator that there is already.
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
    """Makes ``self`` read its dataset as the iterator of a process on its own does."""
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
        # Where an iterator goes into a function, so does the resource.
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
    """Has another thread end what an iterator consists of, when it goes."""
    if tf.executing_eagerly():  # a graph ends its own
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
        # `threading` takes a lock that the code may have in which garbage is collected right now.
        _thread.start_new_thread(end, ())
    except RuntimeError:  # there is no room for a thread, or the process ends
        _ending.discard(is_ending)
        return
    is_ending.acquire(timeout=PATIENCE_S)


def _await_ends() -> None:
    _Exit.has_begun = True
    until = time.monotonic() + PATIENCE_AT_EXIT_S
    for is_ending in tuple(_ending):
        is_ending.acquire(timeout=max(0.0, until - time.monotonic()))
