"""gradring beside a ring of a hundred lines of C: `python -m benches.c_ring`.

Both reduce the same arrays in the same processes in turns, over TCP inside one host. The ring in C
(`c_ring.c`, compiled by `cc`) only adds float32: it checks nothing, and cannot fail in a way that
anybody would understand. *whole* is the textbook's, which passes the buffer through memory twice;
*blocks* does one MiB after the other, as gradring does, which stays in cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import gradring
from benches.harness import Parser, in_turns, print_surroundings, slowest
from gradring.testing import run_ranks
from gradring.tools.bench.systems.link import open_ring

SOURCE = Path(__file__).with_suffix(".c")
#: Bytes, and how often each is reduced in a round.
SIZES = {1 << 20: 50, 4 << 20: 20, 16 << 20: 8, 40 << 20: 4, 100 << 20: 3}
BLOCK_BYTES = 1 << 20


def compile_ring(folder: str) -> Path:
    """Returns the library."""
    library = Path(folder) / "c_ring.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


def rank_main(
    library: Path, sizes: tuple[int, ...], rounds: int
) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Seconds of an all-reduce by size and way, `[rounds, repetitions]`."""
    ring = ctypes.CDLL(str(library)).ring_all_reduce
    ring.argtypes = [ctypes.c_int] * 4 + [ctypes.c_void_p] + [ctypes.c_size_t] * 2
    found = {}
    with gradring.init(transport="tcp") as comm, contextlib.ExitStack() as closing:
        ends = open_ring(comm, closing).descriptors()
        place = comm.rank, comm.world_size

        def reduce_in_c(array: NDArray[np.float32], block_bytes: int) -> None:
            if ring(*ends, *place, array.ctypes.data, array.size, block_bytes // 4):
                raise ConnectionError("the ring in C failed")

        for size in sizes:
            array = np.ones(size // 4, np.float32)
            ways: dict[str, Callable[[], object]] = {
                "gradring": partial(comm.all_reduce, array, "sum"),
                "C, whole": partial(reduce_in_c, array, 0),
                "C, blocks": partial(reduce_in_c, array, BLOCK_BYTES),
            }
            for way, reduce in ways.items():
                array[:] = comm.rank + 1
                reduce()
                expected = comm.world_size * (comm.world_size + 1) / 2
                if not np.array_equal(array, np.full_like(array, expected)):
                    raise AssertionError(f"{way} sums wrong at {size} bytes")
            # Zeros stay what they are, however often they are summed.
            array[:] = 0
            found[size] = in_turns(comm, ways, rounds, SIZES.get(size, 1), warm_ups=1)
    return found


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_rounds(20)
    parser.add_sizes(SIZES)
    options = parser.parse()
    print_surroundings()
    print("# ms, p50 / p90 / p99")
    with tempfile.TemporaryDirectory() as folder:
        library = compile_ring(folder)
        ranks = run_ranks(rank_main, options.ranks, library, options.sizes, options.rounds)
    for size in options.sizes:
        times = slowest([rank[size] for rank in ranks])
        ours = np.median(times["gradring"], axis=1)
        for way, took in times.items():
            p50, p90, p99 = np.quantile(took * 1e3, [0.5, 0.9, 0.99])
            ratio = np.median(ours / np.median(took, axis=1))
            quantiles = f"{p50:8.2f} / {p90:8.2f} / {p99:8.2f}"
            print(f"{size:10} B {way:10} {quantiles}  gradring / it {ratio:.2f}")


if __name__ == "__main__":
    main()
