"""Strangers at the doors of a job: it forms and runs as if they were not there."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority

import gradring
from gradring.launch.ports import free_ports
from gradring.testing import run_ranks

LOCAL = "127.0.0.1"
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


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled() -> tuple[int, int]:
    """File descriptors and threads of this process, once callers and doors have gone."""
    readings: list[tuple[int, int]] = []
    deadline = time.monotonic() + 20
    while (len(readings) < 4 or len(set(readings[-4:])) > 1) and time.monotonic() < deadline:
        readings.append((fds(), len(os.listdir("/proc/self/task"))))
        time.sleep(0.3)
    return readings[-1]


def form_late(delay_s: float, steps: int) -> tuple[float, int, int]:
    """Rank 0's door is open for a while before the others come; then the job runs.

    Returns:
        A sum, and how many file descriptors and threads the process has at the end.
    """
    if os.environ["GRADRING_RANK"] != "0":
        time.sleep(delay_s)
    with gradring.init(timeout=60) as comm:
        x = np.ones(1000, np.float32)
        for _ in range(steps):
            comm.all_reduce(x, op="mean")
        result = float(x.sum()), *settled()
        comm.barrier()
        return result


def undisturbed(world_size: int, env: dict[str, str]) -> list[tuple[float, int, int]]:
    return run_ranks(form_late, world_size, 0.0, 50, env=env)


@pytest.fixture(params=["plain", "tls"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables of a job at a known address, without and with TLS."""
    variables = {"GRADRING_RENDEZVOUS": f"{LOCAL}:{free_ports(1)[0]}", "GRADRING_TRANSPORT": "tcp"}
    if request.param == "tls":
        variables |= Authority(tmp_path).certify("all", LOCAL).variables()
    return variables


def test_strangers_of_all_kinds_do_not_disturb_a_forming_job(env: dict[str, str]) -> None:
    quiet = undisturbed(3, env)
    with crowd(env["GRADRING_RENDEZVOUS"], 10_000, *STRANGERS) as connected:
        disturbed = run_ranks(form_late, 3, 3.0, 50, env=env)
    assert len(connected) > 20
    assert disturbed == quiet


def test_thousands_of_idle_connections_do_not_keep_members_out(env: dict[str, str]) -> None:
    quiet = undisturbed(2, env)
    with idlers(env["GRADRING_RENDEZVOUS"], 3000) as connections:
        disturbed = run_ranks(form_late, 2, 4.0, 50, env=env)
    assert len(connections) > 500
    assert disturbed == quiet


def report_doors(seconds: float, directory: Path) -> tuple[float, int, int]:
    """Runs for a while; notes every port on which this process listens meanwhile."""
    with gradring.init() as comm:
        x = np.ones(1000, np.float32)
        before, _ = settled()
        directory.joinpath(str(comm.rank)).touch()
        deadline = time.monotonic() + seconds
        steps, go_on = 0, np.ones(1)
        while go_on[0]:
            comm.all_reduce(x, op="mean")
            go_on[0] = time.monotonic() < deadline
            comm.broadcast(go_on)
            steps += 1
        return float(x.sum()), settled()[0] - before, steps


def test_a_running_job_has_no_door_and_is_not_disturbed(
    env: dict[str, str], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    refused = []

    def knock() -> None:
        deadline = time.monotonic() + 30
        while len(list(notes.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        host, port = env["GRADRING_RENDEZVOUS"].split(":")
        for _ in range(200):
            with socket.socket() as stranger:
                refused.append(stranger.connect_ex((host, int(port))) != 0)
            time.sleep(0.005)

    knocking = threading.Thread(target=knock)
    knocking.start()
    results = run_ranks(report_doors, 2, 4.0, notes, env=env)
    knocking.join()
    assert refused == [True] * 200
    for total, opened, steps in results:
        assert (total, opened) == (1000.0, 0)
        assert steps > 10


def wait_for_nobody(timeout_s: float) -> tuple[str, int]:
    """Rank 0 of two, the other of which never comes; returns the error and the descriptors left."""
    before = fds()
    try:
        gradring.init(world_size=2, rank=0, timeout=timeout_s)
    except gradring.errors.RendezvousError as error:
        return str(error), settled()[0] - before
    raise AssertionError("somebody was let in")


def test_an_error_names_some_of_those_who_were_turned_away_briefly(env: dict[str, str]) -> None:
    with crowd(env["GRADRING_RENDEZVOUS"], 10_000, scan, ask_for_a_page, babble):
        [(message, left_open)] = run_ranks(wait_for_nobody, 1, 4.0, env=env)
    assert "did not join" in message and "turned away: 127.0.0.1: " in message
    assert "times)" in message and len(message) < 3000
    assert left_open == 0
