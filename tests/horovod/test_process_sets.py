"""Parts of three ranks that reduce at the same time, under Horovod's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.tf_worker import take_one_thread


def call_parts() -> Any:
    import tensorflow as tf

    import gradring
    import gradring.horovod.tensorflow as hvd

    take_one_thread()
    edges = hvd.ProcessSet([2, 0])
    hvd.init(process_sets=[edges])
    found: dict[str, Any] = {"edges": [edges.size(), edges.rank(), edges.included()]}
    rest = hvd.add_process_set([1])
    mine = edges if edges.included() else rest
    own = float(2 ** hvd.rank())
    found["ids"] = [edges.process_set_id, rest.process_set_id]
    found["sum"] = float(hvd.allreduce(own, op=hvd.Sum, process_set=mine))
    found["in a graph"] = tf.function(
        lambda: hvd.allgather(tf.constant([own]), process_set=mine)
    )().numpy()
    root = 1 if mine is rest else 2
    found["root"] = float(hvd.broadcast(own, root, process_set=mine))
    found["object"] = hvd.broadcast_object(hvd.rank(), root, process_set=mine)
    weight = tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=edges) as tape:
        loss = weight * own
    found["gradient"] = float(tape.gradient(loss, weight))
    with pytest.raises(ValueError, match="is not in ProcessSet"):
        hvd.broadcast(own, 3 - root, process_set=mine)
    with pytest.raises(gradring.errors.ConfigError, match="only its ranks call this"):
        hvd.allreduce(own, process_set=rest if mine is edges else edges)
    for ranks in ([], [0, 0], [3]):
        with pytest.raises(ValueError, match="give different ranks below 3"):
            hvd.add_process_set(ranks)
    with pytest.raises(gradring.errors.MismatchError, match=r"\[0\].*\[1\]"):
        hvd.add_process_set([min(hvd.rank(), 1)])
    if hvd.rank() == 1:
        found["last"] = int(hvd.join())
    else:
        with pytest.raises(gradring.errors.MismatchError, match=r"rank 1 has called join\(\)"):
            hvd.add_process_set([0])
        found["last"] = int(hvd.join())
    found["removed"] = hvd.remove_process_set(rest), hvd.remove_process_set(rest)
    with pytest.raises(gradring.errors.ConfigError, match="is not connected"):
        hvd.allreduce(own, process_set=rest)
    found["all"] = float(hvd.allreduce(own, op=hvd.Sum))
    hvd.shutdown()
    with pytest.raises(gradring.errors.ConfigError, match="is not connected"):
        hvd.allreduce(own, process_set=edges)
    wrong: Any
    for wrong in ("static", [[0, 2]]):
        with pytest.raises(gradring.errors.ConfigError, match=r'ProcessSet\(.*, or "dynamic"'):
            hvd.init(process_sets=wrong)
    hvd.init(process_sets="dynamic")
    same = hvd.add_process_set([0, 2] if hvd.rank() else list(np.array([2, 0])))
    again = hvd.add_process_set(edges), same
    if edges.included():
        found["again"] = [float(hvd.allreduce(own, op=hvd.Sum, process_set=each)) for each in again]
    hvd.shutdown()
    return found


def test_parts_of_the_ranks_reduce_by_themselves() -> None:
    ranks = run_ranks(call_parts, 3)
    for rank, found in enumerate(ranks):
        is_edge = rank != 1
        assert found["edges"] == [2, {0: 0, 1: None, 2: 1}[rank], is_edge]
        assert found["ids"] == [1, 2]
        assert found["sum"] == (5.0 if is_edge else 2.0)
        assert found["in a graph"].tolist() == ([1.0, 4.0] if is_edge else [2.0])
        assert found["root"] == (4.0 if is_edge else 2.0)
        assert found["object"] == (2 if is_edge else 1)
        # A rank that is not in the set keeps its own.
        assert found["gradient"] == (2.5 if is_edge else 2.0)
        assert found["removed"] == (True, False)
        assert found["all"] == 7.0
        assert found["last"] != 1
        assert found.get("again") == ([5.0, 5.0] if is_edge else None)
