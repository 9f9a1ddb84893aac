"""Our all-reduce inside TensorFlow against TensorFlow's own; float32 sum over TCP, two ranks here.

Each group has like with like at one size: our op beside the raw op of TensorFlow's collectives, or
`ReplicaContext.all_reduce` under our strategy beside that under `MultiWorkerMirroredStrategy`.
Arrays have no native system in TensorFlow; `gradring bench all-reduce --compare gloo,mpi` has them.

The pytest process is rank 0, and what pytest-benchmark times is rank 0's own call, from a barrier
to the complete result. Rank 1 is a process of its own that takes part in whatever rank 0 announces.
The untimed set-up of each round announces it, copies the input into place, and passes the barrier;
after the round both ranks compare the result, element by element.

The systems follow one another at each size. `gradring bench all-reduce --compare tensorflow` mixes
them round by round instead, which is fairer on a machine whose speed drifts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

import gradring
from benches.peer_rank import prepared, told, totals
from gradring.tools.bench.comparison import called
from gradring.tools.bench.options import DEFAULT_SIZES, format_size, parse_sizes
from gradring.tools.bench.rank import affordable
from gradring.tools.bench.systems import System

SYSTEMS = ("gradring-op", "tensorflow-raw", "gradring-strategy", "tensorflow-strategy")
SIZES = parse_sizes(DEFAULT_SIZES)
WARM_UP_ROUNDS = 3


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("size_bytes", SIZES, ids=lambda size: format_size(size).replace(" ", ""))
def test_all_reduce(
    benchmark: Any,
    comm: gradring.Communicator,
    systems: Sequence[System],
    system: str,
    size_bytes: int,
) -> None:
    # Like with like.
    benchmark.group = f"all-reduce {format_size(size_bytes)}, {called(system)}"
    number = [known.name for known in systems].index(system)
    told(comm, number, size_bytes)
    reduction = prepared(comm, systems[number], size_bytes)
    told(comm, WARM_UP_ROUNDS)
    warm_up = reduction.iterate(WARM_UP_ROUNDS, comm.barrier)
    wrong, cpu_s = warm_up.wrong, 0.0

    def line_up() -> None:
        nonlocal cpu_s
        told(comm, 1, True)
        reduction.reset()
        comm.barrier()
        cpu_s -= time.process_time()

    def look() -> None:
        nonlocal wrong, cpu_s
        cpu_s += time.process_time()
        wrong += reduction.count_wrong()

    rounds = affordable(min(warm_up.durations_s))
    benchmark.pedantic(reduction.run, setup=line_up, teardown=look, rounds=rounds)
    algorithm = systems[number].algorithm()

    told(comm, 0)
    wrong, cpu_s = totals(comm, wrong, cpu_s)
    benchmark.extra_info.update(
        system=system,
        transport=systems[number].transport,
        algorithm=algorithm,
        size_bytes=size_bytes,
        cpu_s=cpu_s,
        wrong=wrong,
    )
    assert wrong == 0
