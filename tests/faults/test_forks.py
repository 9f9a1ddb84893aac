"""Forks of a rank, as pools of data loaders make them, do not disturb it or hide its end."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.config.values import Transport
from gradring.group import forks
from gradring.testing import run_ranks
from gradring.tools import cli
from support.pairs import Pair
from support.waiting import wait_until

LIVES_S = 20
"""How long a fork lives at most: longer than silence takes to be noticed."""


def be_killed_with_a_child(directory: str, transport: Transport) -> None:
    reported = Path(directory, "reported")
    with gradring.init(transport=transport) as comm:
        comm.barrier()
        if comm.rank == 1:
            if os.fork() == 0:
                os.setsid()  # or it would be ended with the rank's process group
                deadline = time.monotonic() + LIVES_S
                while not reported.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(2):
                comm.barrier()
        finally:
            reported.touch()


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.slow), "shm"])
def test_a_killed_rank_is_noticed_at_once_though_a_fork_of_it_lives(
    tmp_path: Path, transport: str
) -> None:
    survivor, _ = run_ranks(be_killed_with_a_child, 2, str(tmp_path), transport, check=False)
    assert isinstance(survivor.exception, errors.PeerLostError), survivor
    assert survivor.exception.rank == 1
    assert "its process has ended" in str(survivor.exception)


PROGRAM = """
import gc, os, sys, warnings, numpy as np, gradring
from gradring import errors
from gradring.config.values import Transport

# From Python 3.12 on, of every fork of a process with threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
with gradring.init() as comm:
    comm.all_reduce(np.ones(4))
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(np.ones(4))
        except errors.GradringError as error:
            print("child:", error.rank, error, flush=True)
        try:
            comm.split(0)
        except errors.GradringError as error:
            assert str(error).startswith("split on rank"), error
        {leaves}
    status = os.waitpid(child, 0)[1]
    print("status", status, "sum", comm.all_reduce(np.ones(4))[0])
"""


@pytest.mark.parametrize(
    "leaves", ["sys.exit()", "comm.close(); os._exit(0)", "del comm; gc.collect(); os._exit(0)"]
)
def test_a_fork_cannot_use_the_group_and_leaves_it_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], leaves: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(leaves=leaves))
    assert cli.main(["run", "-np", "2", "--", sys.executable, str(program)]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    for rank in (0, 1):
        assert f"[{rank}] status 0 sum 2.0" in said.out
        assert f"[{rank}] child: {rank} all_reduce on rank {rank} on " in said.out
        assert "was forked from the one to which this communicator belongs" in said.out


def child_of(pair: Pair, work: Any) -> None:
    """What a fork may do, and what not; exits with 0 if that is as it should be."""
    try:
        for rank in (0, 1):
            with pytest.raises(errors.ConfigError, match=r"from which process \d+ was forked"):
                gradring.Communicator(rank, 2, pair.address)
        for use in (work.done, work.wait):
            with pytest.raises(errors.AbortedError, match="was forked from the one that launched"):
                use()
        with Pair() as own:
            assert sum_of(own) == [2, 2]
            if (grandchild := os.fork()) == 0:
                for address in (pair.address, own.address):
                    with pytest.raises(errors.ConfigError, match="was forked"):
                        gradring.Communicator(0, 2, address)
                with Pair() as its_own:
                    assert sum_of(its_own) == [2, 2]
                os._exit(0)
            assert os.waitpid(grandchild, 0)[1] == 0
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def sum_of(pair: Pair) -> list[float]:
    work = pair.peer.all_reduce_async(x := np.ones(1))
    own = float(pair.comm.all_reduce(np.ones(1))[0])
    work.wait()
    return [own, float(x[0])]


def fork_in_every_way(transport: str) -> None:
    """Forks while a collective is under way: in this thread, another one, a handler, and a pool."""
    warnings.simplefilter("ignore", DeprecationWarning)
    with Pair(transport=transport) as pair:
        x = np.ones(3)
        work = pair.comm.all_reduce_async(x)
        pair.wait_until_rank_0_waits()

        def fork() -> None:
            if (child := os.fork()) == 0:
                child_of(pair, work)
            assert os.waitpid(child, 0)[1] == 0
            ended.append(True)

        ended: list[bool] = []
        fork()
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert len(ended) == 2
        context = multiprocessing.get_context("fork")
        process = context.Process(target=child_of, args=(pair, work))
        process.start()
        process.join()
        assert process.exitcode == 0

        pair.peer.all_reduce(np.ones(3))
        assert work.wait().tolist() == [2, 2, 2]
        before = time.process_time()
        assert sum_of(pair) == [2, 2]
        time.sleep(1.0)
        assert time.process_time() - before < 0.5  # nobody spins

        signal.signal(signal.SIGUSR1, lambda *_: forked.append(os.fork()))
        forked: list[int] = []
        main = os.getpid()
        threading.Thread(target=come_when_it_has_forked, args=(pair, forked)).start()
        try:
            pair.comm.all_reduce(x := np.ones(1))
        except errors.AbortedError as error:
            os._exit(0 if os.getpid() != main and "in the middle" in str(error) else 1)
        assert x.tolist() == [2]
        assert [os.waitpid(child, 0)[1] for child in forked] == [0]

    leave, left = os.pipe()
    with Pair() as pair:
        if (child := os.fork()) == 0:
            os.read(leave, 1)
            with pytest.raises(errors.RendezvousError, match="did not join"):
                gradring.Communicator(0, 2, pair.address, timeout=1.0)
            os._exit(0)
    os.write(left, b"x")
    assert os.waitpid(child, 0)[1] == 0


def come_when_it_has_forked(pair: Pair, forked: list[int]) -> None:
    pair.wait_until_rank_0_waits()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: bool(forked), "the handler has forked")
    pair.peer.all_reduce(np.ones(1))


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def test_forks_have_groups_of_their_own_and_learn_at_once_which_are_their_parents(
    transport: str,
) -> None:
    run_ranks(fork_in_every_way, 1, transport)


def test_a_rank_without_a_page_for_what_its_forks_see_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(errors.ConfigError, match=r"rank 1 on \S+ has no memory left") as raised:
        forks.HeldRank("127.0.0.1:1", 1)
    assert raised.value.rank == 1


INSIDE_A_FORK = """
import os, signal, warnings

# From Python 3.12 on, of every fork of a process with threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
signals = [signal.SIGUSR1]
# Runs after gradring's own part of a fork, because it is registered first.
os.register_at_fork(before=lambda: signals and os.kill(os.getpid(), signals.pop()))
import numpy as np, gradring


def end(child):
    return os._exit(0) if child == 0 else os.waitpid(child, 0)[1]


def handle(*_):
    print("inside", end(os.fork()), flush=True)


with gradring.init() as comm:
    signal.signal(signal.SIGUSR1, handle)
    print("outside", end(os.fork()), "sum", comm.all_reduce(np.ones(4))[0])
"""


def test_a_signal_handler_in_the_middle_of_a_fork_may_fork(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(INSIDE_A_FORK)
    command = ["run", "-np", "2", "--", "timeout", "60", sys.executable, str(program)]
    assert cli.main(command) == 0
    said = capfd.readouterr().out
    for rank in (0, 1):
        assert f"[{rank}] inside 0" in said and f"[{rank}] outside 0 sum 2.0" in said
