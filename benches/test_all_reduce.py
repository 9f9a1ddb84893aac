"""Our all-reduce against TensorFlow's own collectives; float32 sum over TCP, two ranks here.

The pytest process is rank 0, and what pytest-benchmark times is rank 0's own call, from a barrier
to the complete result. Rank 1 is a process of its own that takes part in whatever rank 0 announces.
The untimed set-up of each round announces it, compares the result of the round before on both
ranks, element by element, copies the input into place, and passes the barrier.

The systems follow one another at each size. `gradring bench all-reduce --compare tensorflow` mixes
them round by round instead, which is fairer on a machine whose speed drifts.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from benches import peer_rank
from gradring.bench.comparison import called
from gradring.bench.measurement import P99_ITERATIONS
from gradring.bench.plan import DEFAULT_SIZES, format_size, parse_sizes

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
def test_all_reduce(benchmark: Any, bench: peer_rank.Bench, system: str, size_bytes: int) -> None:
    # Like with like.
    benchmark.group = f"all-reduce {format_size(size_bytes)}, {called(system)}"
    number = [known.name for known in bench.systems].index(system)
    bench.announce(peer_rank.Command.PREPARE, number, size_bytes)
    bench.prepare(number, size_bytes)

    def line_up() -> None:
        bench.announce(peer_rank.Command.RUN)
        bench.line_up()

    for _ in range(WARM_UP_ROUNDS):
        start = time.perf_counter()
        line_up()
        bench.reduction.run()
        round_s = time.perf_counter() - start
    rounds = min(max(int(CELL_S / round_s), MIN_ROUNDS), MAX_ROUNDS)
    benchmark.pedantic(bench.reduction.run, setup=line_up, rounds=rounds)
    algorithm = bench.systems[number].algorithm

    bench.announce(peer_rank.Command.CHECK)
    wrong = bench.wrong()
    benchmark.extra_info.update(
        system=system,
        transport=bench.systems[number].transport,
        algorithm=algorithm,
        bytes=size_bytes,
        wrong=wrong,
    )
    assert wrong == 0
