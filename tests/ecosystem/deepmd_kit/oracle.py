"""``python oracle.py RANKS``, in the directory of a run of `dp`: one process learns as its ranks.

The process has `dp` make the model and the data of each rank, as it would there, and takes the
batches from these. In each step it computes the gradients of every rank's batch, and updates by
their mean. At the end it compares what it has learnt with the checkpoint of the run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from deepmd.tf.entrypoints.train import train
from deepmd.tf.env import tf
from deepmd.tf.train.run_options import RunOptions
from deepmd.tf.train.trainer import DatasetLoader, DPTrainer


def main(ranks: int) -> None:
    """Prints losses and differences, in JSON."""
    of_ranks = [batches_of(rank, ranks) for rank in reversed(range(ranks))]
    trainer, _ = of_ranks[-1]
    with trainer.graph.as_default():
        losses = trained(trainer, [batches for _, batches in reversed(of_ranks)])
    print(json.dumps(losses))


def batches_of(rank: int, ranks: int) -> tuple[Any, list[Any]]:
    """The trainer that `dp` makes on a rank, before it trains, and the batches it would take."""
    made: list[Any] = []

    def place(options: Any) -> None:
        options._init_serial()
        options.my_rank, options.world_size = rank, ranks
        options.is_distrib, options._HVD = False, None

    def collect(trainer: Any, data: Any, _: Any = None) -> None:
        DatasetLoader(data)  # takes a batch, to see what is in one
        made.append((trainer, [data.get_batch() for _ in range(trainer.stop_batch)]))

    RunOptions._try_init_distrib = place
    DPTrainer.train = collect
    with tf.Graph().as_default() as graph:
        train(
            INPUT="input.json",
            init_model=None,
            restart=None,
            output="out-oracle.json",
            init_frz_model=None,
            mpi_log=None,
            log_level=30,
            log_path=None,
        )
    ((trainer, batches),) = made
    trainer.graph = graph
    trainer.disp_file = "lcurve-oracle.out"
    return trainer, batches


def trained(trainer: Any, batches: list[list[Any]]) -> dict[str, float]:
    """Trains by all ranks' batches, and compares with the checkpoint."""
    variables = tf.trainable_variables()
    gradients = tf.gradients(trainer.l2_l, variables)
    means = [tf.placeholder(variable.dtype.base_dtype, variable.shape) for variable in variables]
    optimizer = tf.train.AdamOptimizer(
        trainer.learning_rate * trainer.scale_lr_coef,
        beta1=trainer.optimizer_beta1,
        beta2=trainer.optimizer_beta2,
    )
    pairs = list(zip(means, variables, strict=True))
    update = optimizer.apply_gradients(pairs, global_step=trainer.global_step)
    trainer._init_session()
    session = trainer.sess
    feeds = [[trainer.get_feed_dict(batch, True) for batch in of_rank] for of_rank in batches]
    first = session.run(variables)
    for of_step in zip(*feeds, strict=True):
        of_ranks = [session.run(gradients, feed) for feed in of_step]
        mean = [np.mean(parts, axis=0) for parts in zip(*of_ranks, strict=True)]
        session.run(update, dict(zip(means, mean, strict=True)))

    def loss() -> float:
        """Of the last batches."""
        return float(np.mean([session.run(trainer.l2_l, of_rank[-1]) for of_rank in feeds]))

    own, own_loss = session.run(variables), loss()
    checkpoint = tf.train.load_checkpoint(f"model.ckpt-{trainer.stop_batch}")
    theirs = [checkpoint.get_tensor(variable.op.name) for variable in variables]
    for variable, value in zip(variables, theirs, strict=True):
        variable.load(value, session)
    return {
        "steps": int(session.run(trainer.global_step)),
        "loss": own_loss,
        "loss_of_ranks": loss(),
        "changed": _largest(own, first),
        "difference": _largest(own, theirs),
    }


def _largest(some: list[Any], others: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    main(int(sys.argv[1]))
