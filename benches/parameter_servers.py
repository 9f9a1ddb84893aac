"""Push and pull of 100 MiB by two workers against the raw link.

`python -m benches.parameter_servers`: one process serves, two work. The raw link has the same three
processes and sockets of Python: each worker sends so many bytes and receives as many. Both take
turns; what counts is the ratio of medians.

`python -m benches.parameter_servers copies`: two servers, without copies of their shards and with
one of each (`replicas=1`), in turns.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from gradring import _native
from gradring._native import Config, ParameterClient, ParameterServer
from gradring.machine import resources

BYTES = 100 << 20
WORKERS = 2
ROUNDS = 15
CONFIG = Config({}, token=b"benchmark")
RULE: Any = {
    "staleness": 0,
    "aggregate": 1,
    "overflow": "wait",
    "late": "keep",
    "backup": 0,
    "snapshot_every": 10**9,
}


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[connection.recv_into(buffer) :]


def _serve(raw: int, parameters: str) -> None:
    """Gives every worker of the raw link its bytes back, in threads, and serves parameters."""
    listener = socket.create_server(("127.0.0.1", raw))
    server = ParameterServer(
        index=0, addresses=[parameters], workers=WORKERS, config=CONFIG, **RULE
    )
    print("ready", flush=True)

    def echo(connection: socket.socket) -> None:
        buffer = memoryview(bytearray(BYTES))
        for _ in range(ROUNDS):
            _receive(connection, buffer)
            connection.sendall(buffer)

    for _ in range(WORKERS):
        threading.Thread(target=echo, args=[listener.accept()[0]], daemon=True).start()
    server.serve()


def _client(index: int, addresses: list[str], weights: np.ndarray[Any, Any]) -> ParameterClient:
    """A worker that has the initial weights."""
    client = ParameterClient(worker=index, addresses=addresses, config=CONFIG)
    client.begin(
        [("weights", (BYTES // 4,), "float32", False)],
        {"kind": "sgd", "momentum": 0.0, "nesterov": False},
    )
    if client.pull([weights]) is None:
        client.push_initial([weights])
        client.pull([weights])
    return client


def _serve_copies(index: int, places: list[str]) -> None:
    """Serves at a place among the first two without copies, and among the others with them."""
    servers = [
        ParameterServer(
            index=index,
            addresses=places[2 * replicas : 2 * replicas + 2],
            workers=WORKERS,
            replicas=replicas,
            config=CONFIG,
            **RULE,
        )
        for replicas in range(2)
    ]
    threads = [threading.Thread(target=it.serve) for it in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work_copies(index: int, places: list[str]) -> None:
    """Takes turns between the two, and prints the seconds and the bytes sent of each round."""
    weights, gradient = np.zeros(BYTES // 4, np.float32), np.ones(BYTES // 4, np.float32)
    clients = [_client(index, places[:2], weights), _client(index, places[2:], weights)]
    for _ in range(ROUNDS):
        found = []
        for client in clients:
            sent, begun = client.stats()["bytes_sent"], time.perf_counter()
            client.push([gradient], 1.0)
            client.pull([weights])
            found += [time.perf_counter() - begun, client.stats()["bytes_sent"] - sent]
        print(json.dumps(found), flush=True)
    assert weights[0] == -ROUNDS and weights[-1] == -ROUNDS
    for client in clients:
        client.push([gradient], 1.0)
        client.leave()


def _main_copies() -> None:
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    places = [f"127.0.0.1:{it.getsockname()[1]}" for it in free]
    for it in free:
        it.close()
    command = [sys.executable, "-m", "benches.parameter_servers", "copies"]
    started = [
        subprocess.Popen([*command, role, str(it), *places], stdout=subprocess.PIPE, text=True)
        for role in ("server", "worker")
        for it in range(2)
    ]
    outputs = [it.communicate()[0] for it in started]
    assert [it.wait() for it in started] == [0] * 4
    rounds = [json.loads(line) for output in outputs for line in output.splitlines()]
    medians = [statistics.median(it) for it in zip(*rounds, strict=True)]
    for replicas, (seconds, sent) in enumerate((medians[:2], medians[2:])):
        print(f"replicas={replicas}  median {seconds:.3f} s, {sent / 1e6:.1f} MB sent by a worker")
    print(f"{medians[2] / medians[0]:.2f} times as long; load {resources.load()}")


def _work(index: int, raw: int, parameters: str) -> None:
    """Takes turns between the two, and prints the seconds of each round."""
    connection = socket.create_connection(("127.0.0.1", raw))
    weights, gradient = np.zeros(BYTES // 4, np.float32), np.ones(BYTES // 4, np.float32)
    client = _client(index, [parameters], weights)
    buffer = memoryview(bytearray(BYTES))
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        connection.sendall(buffer)
        _receive(connection, buffer)
        middle = time.perf_counter()
        client.push([gradient], 1.0)
        client.pull([weights])
        print(json.dumps([middle - begun, time.perf_counter() - middle]), flush=True)
    assert weights[0] == -ROUNDS and weights[-1] == -ROUNDS
    client.push([gradient], 1.0)
    client.leave()


def _main() -> None:
    assert not _native.build_info()["debug"], "a debug build says nothing about speed"
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    raw, port = (it.getsockname()[1] for it in free)
    for it in free:
        it.close()
    places = [str(raw), f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "benches.parameter_servers"]
    server = subprocess.Popen([*command, "server", *places], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    workers = [
        subprocess.Popen([*command, str(it), *places], stdout=subprocess.PIPE, text=True)
        for it in range(WORKERS)
    ]
    outputs = [it.communicate()[0] for it in workers]
    assert [it.wait() for it in [*workers, server]] == [0, 0, 0]
    rounds = [json.loads(line) for output in outputs for line in output.splitlines()]
    for name, seconds in zip(("raw link", "push and pull"), zip(*rounds, strict=True), strict=True):
        median, least = statistics.median(seconds), min(seconds)
        rate = WORKERS * 2 * BYTES / median / 1e9
        print(f"{name:14} median {median:.3f} s, least {least:.3f} s, {rate:.2f} GB/s in all")
    link, served = (statistics.median(it) for it in zip(*rounds, strict=True))
    print(f"push and pull takes {served / link:.2f} times as long; load {resources.load()}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _main()
    elif sys.argv[1:] == ["copies"]:
        _main_copies()
    elif sys.argv[1:3] == ["copies", "server"]:
        _serve_copies(int(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1] == "copies":
        _work_copies(int(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1] == "server":
        _serve(int(sys.argv[2]), sys.argv[3])
    else:
        _work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
