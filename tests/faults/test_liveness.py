"""Every wait ends: a warning comes first, then the timeout, and a signal at any time."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.chosen import marked_rows
from support.rank_states import rank_0_waits
from support.waiting import wait_until

LATE_S = 4.0
"""Much longer than the warning takes, and than a group of a busy machine hesitates."""
NOT_FOUND = re.compile("failed to lookup|its name is still being looked up")
"""What is said of a name that nobody has, by a fast and a slow name server."""


def be_late(faulty: int) -> float:
    with gradring.init() as comm:
        if comm.rank == faulty:
            time.sleep(LATE_S)
        return float(comm.all_reduce(np.ones(3), name="step")[2])


def test_a_late_rank_is_named_in_the_log_by_those_who_wait_for_it() -> None:
    variables = {"GRADRING_STALL_WARNING_S": "1"}
    outcomes = run_ranks(be_late, 3, 1, check=False, env=variables)
    for outcome in outcomes:
        assert outcome.value == 3.0, outcome
        warnings = [line for line in outcome.output.splitlines() if "'step'" in line]
        if outcome.rank != 1:
            # After one second, and again after two and four, as far as the rank is late by that.
            warning = warnings[0]
            assert 2 <= len(warnings) <= 3, warnings
            # A waiter that had no processor time is late too, and may wait for another such rank.
            assert re.search(
                rf"rank {outcome.rank} has waited [1-3]\.\d s in all_reduce\(sum\) 'step' "
                r"float64\[3\] \(collective #1\) for (rank \d on \S+, )*rank 1 on \S+?"
                r"(, rank \d on \S+?)*: not entered",
                warning,
            ), warning


CALLS, SIGNALS = ("init", "all_reduce", "wait"), ("SIGINT", "SIGTERM", "a handler of SIGTERM")
QUICK_SIGNALS = [("init", "SIGTERM"), ("all_reduce", "SIGINT"), ("wait", "a handler of SIGTERM")]
"""Each call and each way once."""


def block(call: str, how: str) -> str:
    """Rank 0 blocks until a signal comes; rank 1 is not there, or not in the collective."""
    rank = int(os.environ["GRADRING_RANK"])
    if how == "a handler of SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signum = signal.SIGINT if how == "SIGINT" else signal.SIGTERM
    strike = threading.Timer(1.0, os.kill, [os.getpid(), signum])
    if call == "init":
        if rank == 1:
            return "was not there"
        strike.start()
    comm = gradring.init(timeout=200)
    pid = comm.all_gather(np.array([os.getpid()]))[0]
    if rank == 1:
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "rank 0 has ended")
        try:
            comm.all_reduce(np.ones(3))  # may end with what rank 0 contributed
            comm.all_reduce(np.ones(3))
        except errors.GradringError as error:
            return f"{type(error).__name__} by rank {error.rank}"
    strike.start()
    if call == "all_reduce":
        comm.all_reduce(np.ones(3))
    comm.all_reduce_async(np.ones(3)).wait()
    return "was not interrupted"


@pytest.mark.parametrize(
    ("call", "how"),
    marked_rows(itertools.product(CALLS, SIGNALS), QUICK_SIGNALS),
)
def test_a_signal_ends_every_call_that_blocks(call: str, how: str) -> None:
    first, second = run_ranks(block, 2, call, how, timeout=60, check=False)
    if how == "SIGINT":
        assert isinstance(first.exception, KeyboardInterrupt), first
    else:
        assert first.exit_code == (-signal.SIGTERM if how == "SIGTERM" else 7), first
    if call != "init":
        assert second.value in ("PeerLostError by rank 0", "AbortedError by rank 0"), second


def be_interrupted_with_all(asynchronous: bool) -> None:
    """Rank 0 waits; rank 1 gets Ctrl-C in the same moment and says so at once."""
    with gradring.init() as comm:
        pid = np.array([os.getpid()])
        comm.broadcast(pid, root=0)
        if comm.rank == 1:
            wait_until(rank_0_waits, "rank 0 waits")
            os.kill(int(pid[0]), signal.SIGINT)
            raise KeyboardInterrupt
        if asynchronous:
            comm.all_reduce_async(np.ones(3)).wait()
        comm.all_reduce(np.ones(3))


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ctrl_c_on_all_ranks_is_a_keyboard_interrupt_on_all(asynchronous: bool) -> None:
    for outcome in run_ranks(be_interrupted_with_all, 2, asynchronous, timeout=60, check=False):
        assert isinstance(outcome.exception, KeyboardInterrupt), outcome


def test_an_address_at_which_rank_0_cannot_listen_is_its_own_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        elsewhere = "203.0.113.5:4000"  # for documentation only (RFC 5737)
        for address, kind, problem in [
            (
                in_use,
                errors.RendezvousError,
                "in use .*; end the program that holds the port, or choose another port",
            ),
            (
                elsewhere,
                errors.ConfigError,
                "assign requested address .*; choose an address of this host",
            ),
        ]:
            with pytest.raises(kind) as raised:
                gradring.init(rank=0, world_size=2, rendezvous=address, token="t", timeout=5)
            assert re.search(f"cannot listen on {address}: .* {problem}", str(raised.value))
            assert (raised.value.rank, raised.value.host) == (0, socket.gethostname())


def test_a_rank_with_the_address_of_another_host_does_not_wait_for_rank_0() -> None:
    with pytest.raises(errors.ConfigError, match="choose an address of this host") as raised:
        gradring.init(
            rank=1,
            world_size=2,
            rendezvous="203.0.113.9:4000",
            listen="203.0.113.5:4000",
            token="t",
            timeout=100_000,
        )
    assert raised.value.rank == 1


def test_a_rank_that_waits_for_others_says_so_once_in_the_log_and_once_in_the_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (port,) = free_ports(1)
    with pytest.raises(
        errors.RendezvousError, match=r"^ranks 1 and 2 of 3 did not join rank 0 at "
    ):
        gradring.init(
            rank=0,
            world_size=3,
            rendezvous=f"127.0.0.1:{port}",
            token="t",
            timeout=3,
            stall_warning=1.7,
        )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and re.search(r"has waited \d s for ranks 1 and 2 of 3 to join$", said[0])


@pytest.mark.slow
def test_a_rendezvous_without_an_address_is_named() -> None:
    with pytest.raises(errors.RendezvousError, match=r"at nowhere\.invalid:4000: .*") as raised:
        gradring.init(rank=1, world_size=2, rendezvous="nowhere.invalid:4000", token="t", timeout=3)
    assert raised.value.rank == 0
    assert NOT_FOUND.search(str(raised.value))


def test_missing_ranks_of_a_tf_config_are_named_with_what_is_found_at_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, absent = free_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        workers = [
            f"127.0.0.1:{own}",
            f"127.0.0.1:{absent}",
            "nowhere.invalid:4000",
            f"127.0.0.1:{stranger.getsockname()[1]}",
        ]
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with pytest.raises(errors.RendezvousError) as raised:
            gradring.init(token="t", timeout=2)
    message = str(raised.value)
    assert raised.value.rank == 1
    assert f"1 at {workers[1]} (Connection refused" in message
    assert re.search(rf"2 at {re.escape(workers[2])} \({NOT_FOUND.pattern}", message)
    assert f"3 at {workers[3]} (something listens there, but it did not join)" in message
