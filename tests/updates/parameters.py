"""Parameter servers and workers as processes of their own; as a program, this is one of them.

Every worker's gradient is 1 at the element of its index and at the one as far from the end, and 0
elsewhere; the learning rate is 1. So an element says how many gradients of its worker were applied.
The end of a large vector is on another server: the two say whether one was applied on both.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import numpy as np

from gradring import TlsFiles, _native, errors
from gradring._native import ParameterClient, ParameterServer
from gradring.config.values import Settings
from gradring.machine.ports import free_ports

SGD = '{"sgd": {"momentum": 0.0, "nesterov": false}}'
INITIAL = 1000.0


def config(variables: Mapping[str, str] | None = None, **given: Any) -> _native.Config:
    """With these settings and variables, whatever those of the test say."""
    return Settings.from_environ(variables or {}, **given).for_core()


def server(
    addresses: list[str],
    index: int,
    workers: int,
    *,
    token: bytes = b"secret",
    tls: TlsFiles | None = None,
    timeout: float = 300,
    transport: str | None = None,
    variables: Mapping[str, str] | None = None,
    worker_timeout: float = 5.0,
    directory: str | Path | None = None,
    **rules: Any,
) -> ParameterServer:
    said = {"staleness": None, "late": "keep", "combine": "sum", "snapshot_every": 5, **rules}
    return ParameterServer(
        index=index,
        addresses=addresses,
        rules={name: str(value) for name, value in {"workers": workers, **said}.items()},
        directory=directory,
        worker_timeout=worker_timeout,
        config=config(
            variables, timeout=timeout, transport=transport, token=token or None, tls=tls
        ),
    )


def client(
    addresses: list[str],
    worker: int,
    *,
    elements: int = 8,
    token: bytes = b"secret",
    tls: TlsFiles | None = None,
    timeout: float = 300,
    transport: str | None = None,
    variables: Mapping[str, str] | None = None,
    begins: bool = True,
) -> ParameterClient:
    made = ParameterClient(
        worker=worker,
        addresses=addresses,
        config=config(
            variables, timeout=timeout, transport=transport, token=token or None, tls=tls
        ),
    )
    if begins:
        made.begin([("weights", (elements,), "float32", False)], SGD)
    return made


def pulled(worker: ParameterClient, weights: np.ndarray[Any, Any]) -> int:
    """Takes part in bringing the initial weights, if it is asked to."""
    while (version := worker.pull([weights])) is None:
        worker.push_initial([np.full_like(weights, INITIAL)])
    return version


def gradient(worker: int, elements: int = 8) -> np.ndarray[Any, Any]:
    values = np.zeros(elements, np.float32)
    values[[worker, -1 - worker]] = 1
    return values


def start(**what: Any) -> subprocess.Popen[str]:
    """Another process, which does what `main` reads."""
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(what)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What they have printed, to output and to error, when all have ended well."""
    said = [it.communicate(timeout=120) for it in processes]
    assert [it.returncode for it in processes] == [0] * len(processes), said
    return said


def stats_of(servers: Sequence[subprocess.Popen[str]]) -> list[Any]:
    """What servers say of themselves at their end."""
    return [json.loads(out.splitlines()[-1]) for out, _ in ended(servers)]


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


class Servers(list[subprocess.Popen[str]]):
    """Two processes with these rules; a lost one is replaced by one at its address."""

    def __init__(self, directory: Path | None = None, **rules: Any) -> None:
        """Begins them; with a directory, each has its own in it."""
        self.addresses, self._directory, self._rules = free_addresses(2), directory, rules
        super().__init__(self._begun(index) for index in range(2))

    def lose(self, *lost: int) -> None:
        """These are killed together, and begin again."""
        for index in lost:
            self[index].kill()
        for index in lost:
            self.begin_again(index)

    def begin_again(self, index: int) -> None:
        """In place of one that has ended, or is about to."""
        self[index].communicate()
        self[index] = self._begun(index)

    def directory(self, index: int) -> Path:
        assert self._directory is not None
        return self._directory / str(index)

    def _begun(self, index: int) -> subprocess.Popen[str]:
        place = {"directory": str(self.directory(index))} if self._directory else {}
        return start(role="server", addresses=self.addresses, index=index, **place, **self._rules)


@contextmanager
def serving(made: list[ParameterServer], ends: bool = True) -> Iterator[list[BaseException]]:
    """Servers at work in threads; what they have raised. With `ends`, they end by themselves."""
    raised: list[BaseException] = []

    def serve(one: ParameterServer) -> None:
        try:
            one.serve()
        except errors.GradringError as error:
            raised.append(error)

    threads = [threading.Thread(target=serve, args=[one]) for one in made]
    for thread in threads:
        thread.start()
    try:
        yield raised
    except BaseException:
        ends = False
        raise
    finally:
        if not ends:
            for one in made:
                one.close()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)


def _kill(*processes: int) -> None:
    """These end, and then this one, which waits for it."""
    for process in (*processes, os.getpid()):
        os.kill(process, signal.SIGKILL)
    threading.Event().wait()


def _once(condition: Callable[[], bool], then: Callable[[], None]) -> None:
    def watch() -> None:
        while not condition():
            pass
        then()

    threading.Thread(target=watch, daemon=True).start()


def _work(
    addresses: list[str],
    index: int,
    elements: int,
    dies: str,
    directories: list[str],
    too: list[int],
    transport: str | None = None,
) -> None:
    """Three steps of a worker, and an end in the middle of the next one, of the processes `too`."""
    worker = client(addresses, index, elements=elements, transport=transport)
    weights = np.zeros(elements, np.float32)
    for _ in range(3):
        pulled(worker, weights)
        worker.push([gradient(index, elements)], 1.0)
    # What is restored has weights, so nobody waits for all workers to begin.
    while not all(any(Path(it).glob("snapshot-*[0-9]")) for it in directories):
        time.sleep(0.01)
    if dies == "before the pull":
        _kill(*too)
    if dies == "in the pull":
        received = 4 * elements * 3 + 1000
        _once(lambda: worker.stats()["bytes_received"] > received, lambda: _kill(*too))
    pulled(worker, weights)
    if dies == "before the push":
        _kill(*too)
    if dies == "in the push":
        before = worker.stats()["bytes_sent"]
        _once(lambda: worker.stats()["bytes_sent"] > before + elements, lambda: _kill(*too))
    worker.push([gradient(index, elements)], 1.0)
    if dies == "after the push":
        _kill(*too)
    pulled(worker, weights)
    threading.Event().wait()


def train(worker: ParameterClient, index: int, elements: int, steps: int) -> bytes:
    """Steps of a worker whose gradients have other bits at every element; the last weights."""
    weights = np.zeros(elements, np.float32)
    for step in range(steps):
        pulled(worker, weights)
        noise = np.random.default_rng([index, step]).standard_normal(elements, np.float32)
        worker.push([noise], 0.1)
    pulled(worker, weights)
    return weights.tobytes()


def _train(addresses: list[str], index: int, elements: int, steps: int, **how: Any) -> None:
    worker = client(addresses, index, elements=elements, **how)
    train(worker, index, elements, steps)
    worker.leave()


def _fork(addresses: list[str]) -> None:
    """A worker that has pulled through shared memory, and then a fork of it; both stay."""
    worker, weights = client(addresses, 0, transport="shm"), np.zeros(8, np.float32)
    pulled(worker, weights)
    child = os.fork()
    if child:
        print(child, flush=True)
    threading.Event().wait()


def _without_memory(addresses: list[str]) -> None:
    """A worker that cannot make files, of which shared memory is made."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    heard: queue.Queue[logging.LogRecord] = queue.Queue()
    logging.getLogger("gradring").addHandler(QueueHandler(heard))
    worker = client(addresses, 0)
    pulled(worker, np.zeros(8, np.float32))
    # A thread of its own logs.
    print(worker.stats()["transport"], heard.get(timeout=60).getMessage(), sep="\n")
    worker.leave()


def _main(what: dict[str, Any]) -> None:
    role = what.pop("role")
    if role == "server":
        served = server(**what)
        print("listens", flush=True)
        served.serve()
        print(json.dumps(served.stats()))
    elif role == "forks":
        _fork(**what)
    elif role == "trains":
        _train(**what)
    elif role == "without memory":
        _without_memory(**what)
    else:
        _work(**what)


if __name__ == "__main__":
    assert _native.build_info()
    _main(json.loads(sys.argv[1]))
