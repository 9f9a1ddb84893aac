"""The time that two ranks take to send to each other: `python -m benches.point_to_point`.

In turns, on two ranks: an array goes there and an array of the same size comes back, by `send` and
`recv`; by `broadcast` in a group of two, which the program would have to make; and, if PyTorch is
installed, by Gloo's `send` and `recv`. Half of the time of both is that of one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from benches.harness import Parser, in_turns, print_surroundings, repeated
from gradring.config.values import Transport
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from gradring.tools.bench.options import format_size
from gradring.tools.bench.table import format_time

#: Bytes, and how often there and back in a round.
SIZES = {4: 200, 4 << 10: 200, 64 << 10: 100, 1 << 20: 20, 16 << 20: 6, 100 << 20: 3}


def rank_main(
    sizes: tuple[int, ...], rounds: int, transport: Transport, gloo_port: int
) -> dict[int, Any]:
    """Seconds there and back by size and way, `[rounds]`."""
    import gradring

    found = {}
    with gradring.init(transport=transport) as comm:
        rank, other = comm.rank, 1 - comm.rank
        pair = comm.split(0)
        gloo = _gloo(rank, gloo_port) if gloo_port else None
        for size in sizes:
            x = np.full(size // 4, rank, np.float32)

            def sent(x: Any = x) -> None:
                if rank == 0:
                    comm.send(x, other)
                comm.recv(x, other)
                if rank == 1:
                    comm.send(x, other)

            def broadcast(x: Any = x) -> None:
                assert pair is not None
                for root in (0, 1):
                    pair.broadcast(x, root=root)

            ways: dict[str, Callable[[], None]] = {"send": sent, "broadcast": broadcast}
            if gloo is not None:
                ways["gloo"] = gloo(x)
            many = {way: repeated(once, SIZES[size]) for way, once in ways.items()}
            times = in_turns(comm, many, rounds, warm_ups=1)
            found[size] = {way: took[:, 0] / SIZES[size] for way, took in times.items()}
            assert (x == 0).all(), "rank 0's array went there and back"
    return found


def _gloo(rank: int, port: int) -> Callable[[Any], Callable[[], None]]:
    """Makes what sends an array there and back by Gloo."""
    import torch
    from torch import distributed

    meet = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)

    def make(x: Any) -> Callable[[], None]:
        tensor = torch.from_numpy(x)

        def once() -> None:
            if rank == 0:
                distributed.send(tensor, 1)
            distributed.recv(tensor, 1 - rank)
            if rank == 1:
                distributed.send(tensor, 0)

        return once

    return make


def main() -> None:
    """Runs the benchmark and prints a table."""
    parser = Parser(__doc__)
    parser.add_rounds(15)
    parser.add_sizes(SIZES)
    parser.add_argument("--transport", default="tcp,shm")
    options = parser.parse()
    has_gloo = importlib.util.find_spec("torch") is not None
    print_surroundings()
    print("# one way, p50 / p90")
    for transport in options.transport.split(","):
        port = free_ports(1)[0] if has_gloo else 0
        ranks = run_ranks(rank_main, 2, options.sizes, options.rounds, transport, port, timeout=900)
        for size, ways in ranks[0].items():
            cells = []
            for way, took in ways.items():
                p50, p90 = np.percentile(took / 2 * 1e6, (50, 90))
                cells.append(f"{way} {format_time(p50)} / {format_time(p90)}")
            print(f"{transport} {format_size(size)}: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
