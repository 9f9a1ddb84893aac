"""Strangers at the listeners of a job: it forms and runs as if they were not there."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import gradring
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.certificates import Authority
from support.waiting import wait_until

LOCAL = "127.0.0.1"
INQUIRERS_MAX = 16  # the same in rust/core/src/forming/access.rs
TLS_GREETING = bytes.fromhex("1603010200010001fc0303")

Stranger = Callable[[socket.socket], None]


def scan(visit: socket.socket) -> None:
    """Connects and goes, as a port scanner does."""


def ask_for_a_page(visit: socket.socket) -> None:
    visit.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    visit.recv(1000)


def babble(visit: socket.socket) -> None:
    visit.sendall(random.randbytes(3000))
    visit.recv(1000)


def announce_a_giant(visit: socket.socket) -> None:
    visit.sendall(struct.pack("<I", random.choice([0xFFFF_FFFF, 1 << 30, 1 << 20, 65_536])))
    visit.recv(1000)


def speak_tls(visit: socket.socket) -> None:
    visit.sendall(TLS_GREETING)
    visit.recv(1000)


def trickle(visit: socket.socket) -> None:
    """A greeting at one byte a second never ends before the patience does."""
    visit.sendall(struct.pack("<I", 1000))
    for _ in range(20):
        time.sleep(1)
        visit.sendall(b"\0")


STRANGERS: list[Stranger] = [
    scan,
    ask_for_a_page,
    babble,
    announce_a_giant,
    speak_tls,
    trickle,
]


@contextlib.contextmanager
def crowd(address: str, visits: int, *strangers: Stranger) -> Iterator[list[int]]:
    """Strangers who come one after the other, in some threads; yields how many were let in."""
    host, port = address.split(":")
    over = threading.Event()
    connected: list[int] = []

    def come() -> None:
        for visit in range(visits):
            if over.is_set():
                return
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, int(port)), timeout=1) as connection,
            ):
                connected.append(visit)
                random.choice(strangers)(connection)
            over.wait(0.005)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield connected
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def idlers(address: str, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing, as far as the port takes them."""
    host, port = address.split(":")
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []

        def come() -> None:
            while len(connections) < count and not over.is_set():
                connection = stack.enter_context(socket.socket())
                connection.settimeout(1)
                with contextlib.suppress(OSError):
                    connection.connect((host, int(port)))
                    connections.append(connection)
                    continue
                connection.close()
                over.wait(0.02)

        thread = threading.Thread(target=come)
        thread.start()
        try:
            yield connections
        finally:
            over.set()
            thread.join()


class Usage(NamedTuple):
    """What a process takes of the system."""

    fds: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))

    @classmethod
    def settled(cls) -> Usage:
        """The same, once connections and listeners have gone."""
        readings: list[Usage] = []
        deadline = time.monotonic() + 20
        while len(readings) < 4 or len(set(readings[-4:])) > 1:
            if time.monotonic() > deadline:
                break
            readings.append(cls.now())
            time.sleep(0.3)
        return readings[-1]

    def or_more(self, other: Usage) -> Usage:
        return Usage(*map(max, self, other))

    def with_inquirers(self) -> Usage:
        """With as many connections as a running job greets at once."""
        # A place is given back a moment before its thread and its descriptors are gone.
        return Usage(self.fds + 2 * INQUIRERS_MAX + 8, self.threads + INQUIRERS_MAX + 4)


def within(used: Usage, bound: Usage) -> bool:
    return used.fds <= bound.fds and used.threads <= bound.threads


def form_late(gate: Path, steps: int) -> float:
    """Rank 0 listens before the others come, once ``gate`` exists; then the job runs."""
    if os.environ["GRADRING_RANK"] != "0":
        wait_until(gate.exists, "the others may come")
    with gradring.init(timeout=60) as comm:
        x = np.ones(1000, np.float32)
        for _ in range(steps):
            comm.all_reduce(x, op="mean")
        return float(x.sum())


@pytest.fixture
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables of a job at a known address, without and with TLS."""
    variables = {"GRADRING_RENDEZVOUS": f"{LOCAL}:{free_ports(1)[0]}", "GRADRING_TRANSPORT": "tcp"}
    if request.param == "tls":
        variables |= Authority(tmp_path).certify("all", LOCAL).variables()
    return variables


def form_among(
    strangers: Sequence[object], count: int, world_size: int, gate: Path, env: dict[str, str]
) -> list[float]:
    """Forms a job whose other ranks come when more than ``count`` strangers have come."""

    def open_gate() -> None:
        wait_until(lambda: len(strangers) > count, "strangers came")
        gate.touch()

    with ThreadPoolExecutor() as threads:
        opening = threads.submit(open_gate)
        sums: list[float] = run_ranks(form_late, world_size, gate, 50, env=env)
        opening.result()
    return sums


@pytest.mark.parametrize(
    "env", [pytest.param("plain", marks=pytest.mark.slow), "tls"], indirect=True
)
def test_strangers_of_all_kinds_do_not_disturb_a_forming_job(
    env: dict[str, str], tmp_path: Path
) -> None:
    with crowd(env["GRADRING_RENDEZVOUS"], 10_000, *STRANGERS) as connected:
        sums = form_among(connected, 20, 3, tmp_path / "gate", env)
    assert sums == [1000.0] * 3


@pytest.mark.parametrize(
    "env", ["plain", pytest.param("tls", marks=pytest.mark.slow)], indirect=True
)
def test_thousands_of_idle_connections_do_not_keep_members_out(
    env: dict[str, str], tmp_path: Path
) -> None:
    with idlers(env["GRADRING_RENDEZVOUS"], 3000) as connections:
        sums = form_among(connections, 500, 2, tmp_path / "gate", env)
    assert sums == [1000.0] * 2


def work_on(notes: Path) -> tuple[float, Usage, Usage, Usage]:
    """Works until the strangers have gone.

    Returns:
        A sum, and what this process took before they came, at most, and afterwards.
    """
    with gradring.init() as comm:
        x = np.ones(1000, np.float32)
        comm.all_reduce(x, op="mean")
        before = most = Usage.settled()
        (notes / f"ready-{comm.rank}").touch()
        go_on = np.ones(1)
        while go_on[0]:
            comm.all_reduce(x, op="mean")
            most = most.or_more(Usage.now())
            go_on[0] = not (notes / "gone").exists()
            comm.broadcast(go_on)
            time.sleep(0.01)
        after = Usage.settled()
        comm.barrier()
        return float(x.sum()), before, most, after


def besiege(address: str, notes: Path, seconds: float) -> None:
    """Strangers at a job that runs: once enough of each sort got a connection, for so long."""
    try:
        for rank in range(2):
            wait_until((notes / f"ready-{rank}").exists, f"rank {rank} is ready")
        with crowd(address, 10_000, *STRANGERS) as visits, idlers(address, 3000) as idle:
            wait_until(lambda: len(visits) > 20 and len(idle) > 100, "strangers came")
            time.sleep(seconds)
    finally:
        (notes / "gone").touch()


@pytest.mark.slow
@pytest.mark.parametrize("env", ["plain", "tls"], indirect=True)
def test_a_besieged_job_runs_on_and_greets_few_strangers_at_a_time(
    env: dict[str, str], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with ThreadPoolExecutor() as threads:
        siege = threads.submit(besiege, env["GRADRING_RENDEZVOUS"], notes, 6.0)
        results = run_ranks(work_on, 2, notes, env=env)
    siege.result()
    for total, before, most, after in results:
        assert total == 1000.0
        assert within(most, before.with_inquirers()), (before, most)
        assert within(after, before), (before, after)


def wait_for_nobody(timeout_s: float) -> tuple[str, int]:
    """Rank 0 of two, the other of which never comes; returns the error and the descriptors left."""
    before = Usage.now().fds
    try:
        gradring.init(world_size=2, rank=0, timeout=timeout_s)
    except gradring.errors.RendezvousError as error:
        return str(error), Usage.settled().fds - before
    raise AssertionError("somebody was let in")


@pytest.mark.slow  # a wrong token is told so in `test_tokens.py`
@pytest.mark.parametrize("env", ["plain", "tls"], indirect=True)
def test_an_error_names_some_of_those_who_were_turned_away_briefly(env: dict[str, str]) -> None:
    with crowd(env["GRADRING_RENDEZVOUS"], 10_000, scan, ask_for_a_page, babble):
        [(message, left_open)] = run_ranks(wait_for_nobody, 1, 4.0, env=env)
    assert "did not join" in message and "turned away: 127.0.0.1: " in message
    assert "times)" in message and len(message) < 3000
    assert left_open == 0
