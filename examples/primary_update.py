"""One worker, the primary, computes an update; every replica applies it.

Only calls of tf.distribute: the primary adds its update to the others' zeros. With gradring's
strategy, `broadcast_update` does this in one call; see broadcast_update.py.

    gradring run -np 2 -- python examples/primary_update.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy

STEPS = 5


def main() -> None:
    """Moves a variable towards targets that only the primary sees."""
    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.
    strategy = CustomCollectiveStrategy()
    with strategy.scope():
        position = tf.Variable(np.zeros(3, np.float32))
    worker = strategy.cluster_resolver.task_id
    # Every worker has its own idea of the target. The primary's counts.
    target = tf.constant([1.0, 2.0, 3.0]) * (1.0 - 2.0 * worker)

    def update_of_primary() -> Any:
        context = tf.distribute.get_replica_context()
        update = 0.5 * (target - position)
        # Decided in Python, when the step is traced: each worker has a program of its own, but
        # all of them call the same collectives.
        if context.replica_id_in_sync_group != 0:
            update = tf.zeros_like(update)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, update)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        update = strategy.experimental_local_results(strategy.run(update_of_primary))[0]
        position.assign_add(update)

    for _ in range(STEPS):
        step()
        distance = float(tf.norm(position - tf.constant([1.0, 2.0, 3.0])))
        print(f"distance {distance:.6f}")
    print(f"position {' '.join(f'{x:.6f}' for x in position.numpy())}")


if __name__ == "__main__":
    main()
