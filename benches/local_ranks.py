"""Time of small all-reduces between ranks of one host: `python -m benches.local_ranks`.

Each rank makes calls in a row, without a barrier in between, as a program does that reduces one
small array after another: of `all_reduce`, and of a plan that `prepare` has made, by turns. With
`--empty`, the plan has an array of `Communicator.empty`, and there is a column of ratios. Printed
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
TURNS = 4
#: Bound on the bytes of calls in a row.
BYTES_MAX = 1 << 30
TIMEOUT_S = 600.0


def rank_main(sizes: list[int], calls: int, bytes_max: int, empty: bool) -> list[float]:
    """Seconds of a call by size: of `all_reduce` and of a plan.

    Args:
        sizes: Bytes of the array.
        calls: Calls in a row.
        bytes_max: Bound on the bytes of all calls in a row, for large arrays.
        empty: True if the plan is to have an array of `Communicator.empty`.
    """
    import gradring

    means = []
    with gradring.init(transport="shm") as comm:
        for size in sizes:
            values = np.ones(size // 4, np.float32)
            planned = comm.empty(size // 4) if empty else values
            forms: list[Callable[[], Any]] = [partial(comm.all_reduce, values)]
            forms.append(comm.prepare(planned))
            times = min(calls, max(3, bytes_max // size))
            seconds = np.zeros(2)
            for turn in range(TURNS):
                # There and back, since the speed of a machine drifts.
                for form in (0, 1) if turn % 2 else (1, 0):
                    call = forms[form]
                    for _ in range(min(WARM_UP_CALLS, times)):
                        call()
                    values[:] = planned[:] = 1.0
                    comm.barrier()
                    started = time.perf_counter()
                    for _ in range(times):
                        call()
                    seconds[form] += time.perf_counter() - started
            means += (seconds / (TURNS * times)).tolist()
    return means


def main(arguments: list[str] | None = None) -> None:
    """Measures, and prints a table in Markdown."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", default="2,3,4,8,16", help="default %(default)s")
    parser.add_argument("--calls", type=int, default=1000, help="in a row")
    parser.add_argument("--empty", action="store_true", help="plan arrays of Communicator.empty")
    parser.add_rounds(3)
    parser.add_sizes("4,4KiB,64KiB")
    options = parser.parse(arguments)
    print_surroundings()
    print(f"# us of a call, mean of {options.calls}, median of {options.rounds} runs")
    plan = "plan of empty | ratio" if options.empty else "plan"
    print(f"| ranks | {' | '.join(f'{size} B: all_reduce | {plan}' for size in options.sizes)} |")
    print("|---" * (1 + (2 + options.empty) * len(options.sizes)) + "|")
    for ranks in map(int, options.ranks.split(",")):
        runs = [
            run_ranks(
                rank_main,
                ranks,
                options.sizes,
                options.calls,
                BYTES_MAX,
                options.empty,
                timeout=TIMEOUT_S,
            )[0]
            for _ in range(options.rounds)
        ]
        print(f"| {ranks} | {' | '.join(columns(np.array(runs), options.empty))} |", flush=True)


def columns(runs: np.ndarray[Any, Any], empty: bool) -> list[str]:
    """Returns the medians of all runs in microseconds, and of ratios inside a run if asked for."""
    shown = []
    for of_all_reduce, of_plan in runs.T.reshape(-1, 2, len(runs)):
        shown += [f"{1e6 * np.median(form):.1f}" for form in (of_all_reduce, of_plan)]
        if empty:
            shown.append(f"{np.median(of_plan / of_all_reduce):.2f}")
    return shown


if __name__ == "__main__":
    main()
