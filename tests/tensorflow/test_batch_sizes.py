"""Ranks whose global batches have different sizes."""

from __future__ import annotations

from typing import Any

from gradring.testing import run_ranks
from support.tf_worker import join, refusal


def distribute() -> dict[str, Any]:
    """What each way of distributing batches of 16 and of 8 comes to."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        size = 16 if comm.rank == 0 else 8
        plain = tf.data.Dataset.range(64).repeat().batch(size)
        # TensorFlow does not know the size of these ahead.
        unknown = tf.data.Dataset.range(64).batch(4).map(lambda x: x[: tf.shape(x)[0] - 1])
        off = tf.data.Options()
        off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        own = plain.take(2).with_options(off)
        return {
            "divided": refusal(lambda: strategy.experimental_distribute_dataset(plain)),
            "unknown on rank 1": refusal(
                lambda: strategy.experimental_distribute_dataset(
                    plain if comm.rank == 0 else unknown
                )
            ),
            "off": [
                int(strategy.experimental_local_results(batch)[0].shape[0])
                for batch in strategy.experimental_distribute_dataset(own)
            ],
            "scalar": refusal(
                lambda: strategy.experimental_distribute_dataset(
                    tf.data.Dataset.zip(plain, tf.data.Dataset.range(9))
                )
            ),
            "function": refusal(lambda: strategy.distribute_datasets_from_function(lambda _: own)),
        }


def test_batch_sizes_that_differ_are_an_error_on_all_ranks_where_batches_are_divided() -> None:
    for rank, told in enumerate(run_ranks(distribute, 2)):
        error = told.pop("divided")
        assert error.startswith("MismatchError: experimental_distribute_dataset: rank 1 on ")
        assert "has batch_size=8, and rank 0 on " in error and "batch_size=16" in error
        scalar = told.pop("scalar")
        assert scalar.startswith(f"ConfigError: rank {rank} of ")
        assert "tensor 2 of 2 in its elements is a scalar; repeat it for each" in scalar
        assert told == {
            "unknown on rank 1": "not refused",
            "off": [[8] * 4, [4] * 4][rank],
            "function": "not refused",
        }
