"""Time of small all-reduces between ranks of one host: `python -m benches.local_ranks`.

Each rank makes calls in a row, without a barrier in between, as a program does that reduces one
small array after another: of `all_reduce`, and of a plan that `prepare` has made, by turns. Printed
is the mean time of a call, the median of several runs. Time that a rank waits for another one is in
it. `gradring bench all-reduce` measures single calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benches.harness import Parser, print_surroundings
from gradring.testing import run_ranks

WARM_UP_CALLS = 50
#: How often each form has its turn.
TURNS = 3
TIMEOUT_S = 600.0


def rank_main(sizes: list[int], calls: int) -> list[float]:
    """Seconds of a call by size: of `all_reduce` and of a plan."""
    import gradring

    means = []
    with gradring.init(transport="shm") as comm:
        for size in sizes:
            values = np.ones(size // 4, np.float32)
            forms: list[Callable[[], Any]] = [partial(comm.all_reduce, values)]
            forms.append(comm.prepare(values))
            seconds = np.zeros(2)
            for _ in range(TURNS):
                for form, call in enumerate(forms):
                    for _ in range(WARM_UP_CALLS):
                        call()
                    values[:] = 1.0
                    comm.barrier()
                    started = time.perf_counter()
                    for _ in range(calls):
                        call()
                    seconds[form] += time.perf_counter() - started
            means += (seconds / (TURNS * calls)).tolist()
    return means


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a table in Markdown."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", default="2,3,4,8,16", help="default %(default)s")
    parser.add_argument("--calls", type=int, default=1000, help="in a row")
    parser.add_rounds(3)
    parser.add_sizes("4,4KiB,64KiB")
    options = parser.parse(arguments)
    print_surroundings()
    print(f"# us of a call, mean of {options.calls}, median of {options.rounds} runs")
    print(f"| ranks | {' | '.join(f'{size} B: all_reduce | plan' for size in options.sizes)} |")
    print("|---" * (1 + 2 * len(options.sizes)) + "|")
    for ranks in map(int, options.ranks.split(",")):
        runs = [
            run_ranks(rank_main, ranks, options.sizes, options.calls, timeout=TIMEOUT_S)[0]
            for _ in range(options.rounds)
        ]
        medians = 1e6 * np.median(runs, axis=0)
        print(f"| {ranks} | {' | '.join(f'{each:.1f}' for each in medians)} |", flush=True)


if __name__ == "__main__":
    main()
