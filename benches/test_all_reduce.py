"""Our all-reduce against TensorFlow's own collectives; float32 sum over TCP, two ranks here.

The pytest process is rank 0, and what pytest-benchmark times is rank 0's own call, from a barrier
to the complete result. Rank 1 is a process of its own that takes part in whatever rank 0 announces.
The untimed set-up of each round announces it, compares the result of the round before on both
ranks, element by element, copies the input into place, and passes the barrier.

The systems follow one another at each size. `gradring bench all-reduce --compare tensorflow` mixes
them round by round instead, which is fairer on a machine whose speed drifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import gradring
from benches.peer_rank import prepared, told, total
from gradring.bench.comparison import called
from gradring.bench.measurement import P99_ITERATIONS
from gradring.bench.options import DEFAULT_SIZES, format_size, parse_sizes
from gradring.bench.systems import LocalSystem

SYSTEMS = (
    "gradring",
    "gradring-op",
    "tensorflow-raw",
    "gradring-strategy",
    "tensorflow-strategy",
)
SIZES = parse_sizes(DEFAULT_SIZES)
CELL_S = 2.0
MIN_ROUNDS, MAX_ROUNDS = P99_ITERATIONS, 1000
WARM_UP_ROUNDS = 3


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("size_bytes", SIZES, ids=lambda size: format_size(size).replace(" ", ""))
def test_all_reduce(
    benchmark: Any,
    comm: gradring.Communicator,
    systems: Sequence[LocalSystem],
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
    wrong = warm_up.wrong

    def line_up() -> None:
        nonlocal wrong
        wrong += reduction.count_wrong()
        told(comm, 1)
        reduction.reset()
        comm.barrier()

    rounds = min(max(int(CELL_S / warm_up.durations_s[-1]), MIN_ROUNDS), MAX_ROUNDS)
    benchmark.pedantic(reduction.run, setup=line_up, rounds=rounds)
    algorithm = systems[number].algorithm

    told(comm, 0)
    wrong = total(comm, wrong + reduction.count_wrong())
    benchmark.extra_info.update(
        system=system,
        transport=systems[number].transport,
        algorithm=algorithm,
        size_bytes=size_bytes,
        wrong=wrong,
    )
    assert wrong == 0
