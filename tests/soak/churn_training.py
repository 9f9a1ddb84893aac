"""An elastic training with `fit`, as ``soak.churn`` disturbs it; notes what its process holds."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy, elastic
from gradring.tools.demo import train
from support.proc import descriptors

# Several processes share a core.
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

HERE = Path(sys.argv[1])
COMMIT_EVERY = 5


def note(kind: str, **facts: Any) -> None:
    """A line for ``soak.churn``."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    facts |= {
        "kind": kind,
        "at_s": time.monotonic(),
        "pid": os.getpid(),
        "rank": comm.rank,
        "size": comm.world_size,
        "generation": comm.generation,
        "step": int(model.optimizer.iterations.numpy()),
        "memory_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(descriptors()),
    }
    with (HERE / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


keras.utils.set_random_seed(train.SEED)
strategy = CustomCollectiveStrategy()
comm = strategy.communicator
(images, labels), test = train.load_data()
with strategy.scope():
    model = train.build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(train.build_optimizer(), loss, jit_compile=False)
batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(train.GLOBAL_BATCH)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
batches = batches.with_options(options)
state = elastic.State(model=model, epoch=0, step=0)


@elastic.run(strategy, min_workers=1, max_workers=4)
def train_on(state: elastic.State) -> None:
    """Until there is a file ``stop``, which all see in the same epoch."""
    note("group")
    while True:
        commits = elastic.CommitState(state, every_steps=COMMIT_EVERY)
        rest, epoch = batches.skip(state.step), state.epoch
        model.fit(rest, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[commits])
        if comm.all_reduce(np.array([(HERE / "stop").exists()], np.uint8), "max")[0]:
            return


note("start")
train_on(state)
digest = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
note("end", digest=digest, accuracy=train.accuracy(tf.function(model), *test))
