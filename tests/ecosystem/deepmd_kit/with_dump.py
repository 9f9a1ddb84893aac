"""``python with_dump.py ARGUMENTS OF dp``: `dp`, which then writes what this rank has learnt.

`dp` itself writes checkpoints on rank 0 only. Everything up to the end of its training is its own.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from deepmd.main import main
from deepmd.tf.env import tf
from deepmd.tf.train.trainer import DPTrainer

train = DPTrainer.train


def train_and_dump(self: Any, *args: Any, **kwargs: Any) -> None:
    """Writes all variables, those of the optimizer too, by their names."""
    train(self, *args, **kwargs)
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    np.savez(f"variables-{os.environ['GRADRING_RANK']}.npz", **self.sess.run(variables))


if __name__ == "__main__":
    DPTrainer.train = train_and_dump
    main()
