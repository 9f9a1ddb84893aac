"""Distance of `auto` from the best algorithm, simulated: `python -m benches.simulated_choice`.

For each layout of ranks on hosts and each size, the time of what `auto` chooses over that of the
fastest algorithm that such a group has the links for, on the network that `gradring simulate`
takes by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benches.harness import Parser
from gradring._native import time_collective
from gradring.errors import GradringError
from gradring.tools.bench.options import ALGORITHMS, format_size
from gradring.tools.bench.table import format_time
from gradring.tools.simulate.options import Network

#: Ranks, and how many of them are on each host.
LAYOUTS = (
    *((ranks, 1) for ranks in (2, 3, 4, 8, 12, 16, 32, 48, 64, 65, 96, 128, 200, 256, 1000, 1024)),
    *((12, 2), (16, 4), (24, 8), (32, 8), (64, 8), (96, 8), (128, 8), (1000, 8), (1024, 8)),
)
SIZES = "4,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,100MiB"
#: More ranks are not all connected with one another.
MESH_RANKS_MAX = 64
#: Of those algorithms that send to all ranks, which take long to play.
FLAT_BYTES_MAX = 4 << 20


def candidates(ranks: int, ranks_per_host: int, size: int) -> list[str]:
    """What a group of so many ranks can choose for a buffer of so many bytes."""
    names = [name for name in ALGORITHMS if name != "auto"]
    if ranks > MESH_RANKS_MAX:
        names = ["ring", "halving", "doubling"]
    elif ranks > MESH_RANKS_MAX // 2 and size > FLAT_BYTES_MAX:
        names = [name for name in names if name not in ("direct", "one_shot", "star")]
    if ranks_per_host == 1 and "hierarchical" in names:
        names.remove("hierarchical")
    return names


def compare(
    ranks: int, ranks_per_host: int, sizes: Sequence[int]
) -> Iterator[tuple[int, str, float, str, float]]:
    """Size, choice, its seconds, the best algorithm, its seconds."""
    network = Network(world_size=ranks, ranks_per_host=ranks_per_host)
    for size in sizes:
        try:
            (chosen,) = time_collective(network, [size], "auto")
        except GradringError as error:
            print(f"{ranks} ranks, {format_size(size)}: {error}")
            continue
        seconds = {
            name: time_collective(network, [size], name)[0]["seconds"]
            for name in candidates(ranks, ranks_per_host, size)
        }
        best = min(seconds, key=seconds.__getitem__)
        yield size, chosen["algorithm"], chosen["seconds"], best, seconds[best]


def main() -> None:
    """Prints a row for each layout and size."""
    parser = Parser(__doc__)
    parser.add_sizes(SIZES)
    arguments = parser.parse()
    print("| ranks x on each host | size | auto | best | auto / best |")
    print("|---|---|---|---|---|")
    ratios = []
    for ranks, ranks_per_host in LAYOUTS:
        for size, chosen, took_s, best, best_s in compare(ranks, ranks_per_host, arguments.sizes):
            ratios.append(took_s / best_s)
            print(
                f"| {ranks} x {ranks_per_host} | {format_size(size)} | "
                f"{chosen}, {format_time(took_s * 1e6)} | {best}, {format_time(best_s * 1e6)} | "
                f"{ratios[-1]:.2f} |",
                flush=True,
            )
    print(f"{len(ratios)} cases, at most {max(ratios):.2f}")


if __name__ == "__main__":
    main()
