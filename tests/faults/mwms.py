"""``python -m faults.mwms``: the same drill for TensorFlow's own strategy, to compare with.

Two workers train in a custom loop under ``MultiWorkerMirroredStrategy``. In the middle of the
training worker 1 is killed, or stopped; printed is what worker 0 gets, and when.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from faults.stage import Stage
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.testing import run_ranks

STEPS_BEFORE = 20
LIMIT_S = 180.0


def train(stage: Stage, ports: list[int], how: signal.Signals) -> tuple[str, float]:
    """Trains until the strategy fails; returns the error, and the seconds it took."""
    rank = int(os.environ["GRADRING_RANK"])
    workers = [f"{LOOPBACK}:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    stage.tell(f"pid-{rank}", os.getpid())
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.ones([512, 512]))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.ones([64, 512]) @ weights))
            gradient = tape.gradient(loss, weights)
            context = tf.distribute.get_replica_context()
            weights.assign_sub(1e-3 * context.all_reduce("sum", gradient))

        strategy.run(replica)

    try:
        for number in range(1_000_000):
            if rank == 1 and number == STEPS_BEFORE:
                stage.tell("struck", time.monotonic())
                os.kill(os.getpid(), how)
            step()
            weights.numpy()
    except Exception as error:
        ended_at = time.monotonic()
        stage.tell("done")
        took = ended_at - (stage.told("struck") or ended_at)
        return f"{type(error).__name__}: {error}", took
    raise AssertionError("the strategy did not notice")


def end_the_stopped(stage: Stage) -> None:
    with contextlib.suppress(TimeoutError, ProcessLookupError):
        stage.wait("pid-1", "done", within_s=LIMIT_S)
        os.kill(int(stage.told("pid-1") or 0), signal.SIGKILL)


def main() -> None:
    """Runs both drills."""
    for how in (signal.SIGKILL, signal.SIGSTOP):
        with tempfile.TemporaryDirectory() as directory:
            stage = Stage(Path(directory))
            director = threading.Thread(target=end_the_stopped, args=(stage,))
            director.start()
            arguments = (stage, free_ports(2), how)
            first, _ = run_ranks(train, 2, *arguments, timeout=LIMIT_S, check=False)
            director.join()
        if isinstance(first.value, tuple):
            error, seconds = first.value
            print(f"{how.name}: after {seconds:.1f} s, {len(error.splitlines())} lines:\n{error}\n")
        else:  # TensorFlow may end the process from one of its own threads
            print(f"{how.name}: {first.summary()}\n{first.details()}")


if __name__ == "__main__":
    main()
