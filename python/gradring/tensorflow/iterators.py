"""Iterators over distributed datasets that can be left before their end.

The iterator that TensorFlow's strategies use reads ahead in a thread. When it goes, it first lets
go of its dataset and then waits for the thread, which asks that very dataset how many tensors an
element has: the process ends by SIGSEGV. Keras leaves an iterator whenever it has built a model
from its first batch; other programs do so by `break`, `steps_per_epoch` or an exception.

Every dataset but one is also owned by what reads from it, so it lives until the thread has ended.
The exception is a dataset of options, and TensorFlow puts one in front. So another goes before it.
"""

from __future__ import annotations

import functools
from typing import Any

from gradring.tensorflow import compat


def let_leave() -> None:
    """Mends the iterators that are made from now on, those of TensorFlow's own strategies too."""
    original = compat.MultiDeviceIterator.__init__

    @functools.wraps(original)
    def init(self: Any, dataset: Any = None, *args: Any, **kwargs: Any) -> None:
        # Without a dataset, it stands for an iterator that there is already.
        original(self, None if dataset is None else _Kept(dataset), *args, **kwargs)

    compat.MultiDeviceIterator.__init__ = init


class _Kept(compat.UnchangedDataset):  # type: ignore[misc]
    """The same dataset, whose options are followed by a dataset that takes all elements."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, dataset._variant_tensor)

    def with_options(self, *args: Any, **kwargs: Any) -> Any:
        return super().with_options(*args, **kwargs).take(-1)
