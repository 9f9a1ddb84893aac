"""Counts of replicas that have a value, in iterators over distributed datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat


def count_in_iterators(
    count: Callable[[Any, tf.Tensor, list[Any]], tf.Tensor | None],
    note: Callable[[Any, Any], None],
) -> None:
    """Makes iterators over distributed datasets call these functions for each batch.

    Args:
        count: Takes the strategy, the number of this process's replicas with a value, of shape
            `[1]`, and their optional values. Returns the number of all replicas with a value, a
            scalar, or None to let TensorFlow count.
        note: Takes the strategy and a batch, for iterators that need no count because all replicas
            always have a value.
    """
    own_strategy, cardinality, enable_get_next_as_optional = (
        compat.row(f"DistributedIteratorBase.{name}")
        for name in ("_strategy", "_cardinality", "_enable_get_next_as_optional")
    )

    def counted(
        calculate: Callable[..., Any],
        strategy: Any,
        input_workers: Any,
        optional_list: list[list[Any]],
    ) -> Any:
        ours = [optional for worker in optional_list for optional in worker]
        has_values = [tf.cast(optional.has_value(), tf.int64) for optional in ours]
        found = count(strategy, tf.reduce_sum(has_values, keepdims=True), ours)
        return calculate(strategy, input_workers, optional_list) if found is None else found

    def next_batch(get_next: Callable[..., Any], self: Any, name: str | None = None) -> Any:
        batch = get_next(self, name)
        if not enable_get_next_as_optional.of(self):
            note(own_strategy.of(self), batch)
        return batch

    def next_optional(get_next: Callable[..., Any], self: Any) -> Any:
        batch = get_next(self)
        if cardinality.of(self) == tf.data.INFINITE_CARDINALITY:
            note(own_strategy.of(self), batch.get_value())
        return batch

    compat.replace(
        {
            "input_lib._calculate_replicas_with_values": counted,
            "DistributedIteratorBase.get_next": next_batch,
            "DistributedIteratorBase.get_next_as_optional": next_optional,
        }
    )
