"""Push and pull of 100 MiB by two workers over TCP, through shared memory, and over a raw link.

`python -m benches.parameter_servers`: one process serves, two work. The raw link has the same three
processes and sockets of Python: each worker sends so many bytes and receives as many. All take
turns; what counts are the ratios of medians.

`python -m benches.parameter_servers copies`: two servers, without copies of their shards and with
one of each (`replicas=1`), in turns.

With `--rate`, each process has a simulated host; this needs root.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from benches import raw_link
from benches.harness import TIMEOUT_S, Parser, Step, in_turns, print_surroundings
from benches.raw_link import RawLink
from gradring._native import Config, ParameterClient, ParameterServer
from gradring.config.values import Settings
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.testing import run_ranks
from gradring.tools.bench.network import network

BYTES = 100 << 20
#: The first ranks; the others serve.
WORKERS = 2
LINK = "raw link"
SHARED_MEMORY = "shared memory"
#: By kind: `replicas`, and the transport of workers and servers.
SERVED = {
    "over TCP": (0, "tcp"),
    SHARED_MEMORY: (0, "shm"),
    "replicas=0": (0, "auto"),
    "replicas=1": (1, "auto"),
}
#: By the word for the command line: what is compared, and how many servers there are.
COMPARED = {
    "transports": ([LINK, "over TCP", SHARED_MEMORY], 1),
    "copies": (["replicas=0", "replicas=1"], 2),
}
RULES = {
    "workers": str(WORKERS),
    "staleness": "0",
    "late": "keep",
    "snapshot_every": str(10**9),
}


def rank_main(kinds: list[str], servers: int, rounds: int, hosts: Sequence[str]) -> dict[str, Any]:
    """By kind, the seconds of each round and the bytes that a worker sends in it."""
    with gradring.init(stall_timeout=TIMEOUT_S) as comm:
        ports = comm.broadcast(np.array(free_ports(1 + servers * len(kinds)))).tolist()
        raw = f"{hosts[WORKERS]}:{ports[0]}"
        serving = itertools.cycle(hosts[WORKERS:])
        places = [f"{host}:{port}" for host, port in zip(serving, ports[1:], strict=False)]
        served = [kind for kind in kinds if kind != LINK]
        groups = [places[servers * number :][:servers] for number in range(len(served))]
        if comm.rank >= WORKERS:
            if LINK in kinds:
                raw_link.serve(raw)
            threads = [
                _serve(comm.rank - WORKERS, group, *SERVED[kind])
                for kind, group in zip(served, groups, strict=True)
            ]
            comm.barrier()
            in_turns(comm, dict.fromkeys(kinds), rounds)
            for thread in threads:
                thread.join()
            return {}
        comm.barrier()
        weights, gradient = np.zeros(BYTES // 4, np.float32), np.ones(BYTES // 4, np.float32)
        clients = [
            _client(comm.rank, group, SERVED[kind][1], weights)
            for kind, group in zip(served, groups, strict=True)
        ]
        before = [client.stats()["bytes_sent"] for client in clients]
        steps: dict[str, Step] = {
            kind: partial(_push_and_pull, client, gradient, weights)
            for kind, client in zip(served, clients, strict=True)
        }
        if LINK in kinds:
            steps = {LINK: partial(RawLink(raw).exchange, BYTES, BYTES), **steps}
        seconds = in_turns(comm, steps, rounds)
        sent = [client.stats()["bytes_sent"] for client in clients]
        assert weights[0] == -rounds and weights[-1] == -rounds
        for client in clients:
            client.push([gradient], 1.0)
            client.leave()
        a_round = ((after - first) / rounds for after, first in zip(sent, before, strict=True))
        return {"seconds": seconds, "sent": dict(zip(served, a_round, strict=True))}


def _config(transport: str) -> Config:
    return Settings.from_environ({}, transport=transport, token=b"benchmark").for_core()


def _serve(index: int, addresses: list[str], replicas: int, transport: str) -> threading.Thread:
    server = ParameterServer(
        index=index,
        addresses=addresses,
        rules={**RULES, "replicas": str(replicas)},
        config=_config(transport),
    )
    thread = threading.Thread(target=server.serve)
    thread.start()
    return thread


def _client(
    index: int, addresses: list[str], transport: str, weights: NDArray[Any]
) -> ParameterClient:
    """A worker that has the initial weights."""
    client = ParameterClient(worker=index, addresses=addresses, config=_config(transport))
    client.begin(
        [("weights", (BYTES // 4,), "float32", False)],
        '{"sgd": {"momentum": 0.0, "nesterov": false}}',
    )
    if client.pull([weights]) is None:
        client.push_initial([weights])
        client.pull([weights])
    return client


def _push_and_pull(client: ParameterClient, gradient: NDArray[Any], weights: NDArray[Any]) -> None:
    client.push([gradient], 1.0)
    client.pull([weights])


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_rate(None)
    parser.add_argument("what", nargs="?", choices=COMPARED, default="transports")
    parser.add_rounds(15)
    options = parser.parse()
    kinds, servers = COMPARED[options.what]
    if options.rate:
        kinds = [kind for kind in kinds if kind != SHARED_MEMORY]
    processes = WORKERS + servers
    print_surroundings()
    with network(hosts=processes if options.rate else 1, rate=options.rate) as hosts:
        names = [host.address for host in hosts] or [LOOPBACK] * processes
        given = (kinds, servers, options.rounds, names)
        ranks = run_ranks(rank_main, processes, *given, hosts=hosts, timeout=TIMEOUT_S)[:WORKERS]
    medians = []
    for kind in kinds:
        seconds = np.concatenate([rank["seconds"][kind].ravel() for rank in ranks])
        medians.append(median := float(np.median(seconds)))
        rate, sent = WORKERS * 2 * BYTES / median / 1e9, ranks[0]["sent"].get(kind, BYTES) / 1e6
        times = f"median {median:.3f} s, least {seconds.min():.3f} s, {rate:.2f} GB/s in all"
        print(f"{kind:14} {times}, {sent:.1f} MB sent by a worker")
    for index in range(1, len(kinds)):
        ratios = [f"{medians[index] / medians[to]:.2f} of {kinds[to]}" for to in range(index)]
        print(f"{kinds[index]} takes {', '.join(ratios)}")


if __name__ == "__main__":
    main()
