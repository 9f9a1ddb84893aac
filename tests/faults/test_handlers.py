"""Signal handlers and finalizers that use the communicator in whose call they run: what they ask
for happens, or is refused, at once."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.chosen import marked
from support.pairs import Pair


def drives(comm: gradring.Communicator) -> None:
    comm.all_reduce(np.ones(4), name="outer")


def is_queued(comm: gradring.Communicator) -> None:
    comm.all_reduce_async(np.ones(4), name="before")
    comm.all_reduce(np.ones(4), name="outer")


def waits(comm: gradring.Communicator) -> None:
    comm.all_reduce_async(np.ones(4), name="outer").wait()


def gathers(comm: gradring.Communicator) -> None:
    comm.all_gather(np.ones(4), name="outer")


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def close_twice(comm: gradring.Communicator) -> None:
    comm.close()
    comm.close()


def close_and_wait(comm: gradring.Communicator) -> None:
    comm.close()
    comm.all_reduce_async(np.ones(1)).wait()


def ask_and_close(comm: gradring.Communicator) -> None:
    comm.stats()
    comm.close()


def leave_by_error(comm: gradring.Communicator) -> None:
    comm.__exit__(ValueError, ValueError("in a handler"), None)


ENDING: dict[str, Callable[[gradring.Communicator], object]] = {
    "close": lambda comm: comm.close(),
    "close twice": close_twice,
    "close in a thread": lambda comm: in_a_thread(comm.close),
    "leave": leave_by_error,
    "abort": lambda comm: comm.abort("by a handler"),
    "close and wait": close_and_wait,
    "stats": ask_and_close,
}
REFUSED: dict[str, Callable[[gradring.Communicator], object]] = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(2)),
    "all_reduce_async": lambda comm: comm.all_reduce_async(np.ones(2)),
}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except errors.GradringError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def handled(outer: Callable[..., None], inner: Callable[..., object], transport: str) -> list[str]:
    """What came of ``inner`` in a handler, of ``outer`` in whose middle it ran, and of the peer."""
    with Pair(transport=transport) as pair:
        found = []

        def handler(number: int, frame: FrameType | None) -> None:
            found.append(outcome(lambda: inner(pair.comm)))
            pair.comm.close()

        signal.signal(signal.SIGUSR1, handler)
        threading.Thread(target=interrupt_when_it_waits, args=(pair,)).start()
        found.append(outcome(lambda: outer(pair.comm)))
        outcome(lambda: outer(pair.peer))  # ends, perhaps well: rank 0's part may have arrived
        found.append(outcome(pair.peer.barrier))
        return found


OUTERS: dict[str, Callable[[gradring.Communicator], None]] = {
    outer.__name__: outer for outer in (drives, is_queued, waits, gathers)
}
#: A call that this thread drives, and one that only waits for another thread.
QUICK = ("drives", "waits")


def every_handler(outer_name: str) -> list[str]:
    """What was not as it should be."""
    outer = OUTERS[outer_name]
    wrong = []
    cases = [(name, call, True) for name, call in ENDING.items()]
    cases += [(name, call, False) for name, call in REFUSED.items()]
    for number, (name, call, ends) in enumerate(cases):
        if outer is waits and not ends:
            continue  # it may: what it launches comes after all that were launched
        inner, ended, peer = handled(outer, call, ("tcp", "shm")[number % 2])
        if ends:
            right = inner == "fine" or (name == "close and wait" and "AbortedError" in inner)
        else:
            right = inner.startswith("GradringError: rank 0 on ") and "set a flag" in inner
        of_peer = peer.partition(":")[0] in ("AbortedError", "PeerLostError")
        if not (right and ended.startswith("AbortedError: ") and of_peer):
            wrong.append(f"{name} while it {outer.__name__}: {inner!r}, {ended!r}, {peer!r}")
    return wrong


def others() -> None:
    """Finalizers, storms of signals, handlers that raise, and one that runs while a group forms."""
    with Pair() as pair:

        class Garbage:
            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                collected.append(outcome(pair.comm.barrier))
                pair.comm.close()

        collected: list[str] = []
        gc.disable()  # it is collected by the handler, and not before, by chance, in a thread
        Garbage()
        signal.signal(signal.SIGUSR1, lambda *_: gc.collect())
        threading.Thread(target=interrupt_when_it_waits, args=(pair,)).start()
        ended = outcome(lambda: drives(pair.comm))
        gc.enable()
        assert "finalizer that ran while" in collected[0] and "was closed while" in ended

    signal.signal(signal.SIGALRM, lambda *_: storm.append(len(storm)))
    storm: list[Any] = []
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for settings in ({"transport": "tcp"}, {"transport": "shm"}, {"checksum": True}):
            with Pair(**settings) as pair:
                for count in (1, 1000, 1_000_000):
                    works = [c.all_reduce_async(np.ones(count)) for c in (pair.comm, pair.peer)]
                    assert [work.wait()[-1] for work in works] == [2, 2]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(storm) > 10

    for raised in (SystemExit, KeyboardInterrupt):
        with Pair() as pair:

            def leave(number: int, frame: FrameType | None, pair: Pair = pair) -> None:
                pair.comm.close()
                raise raised  # noqa: B023

            signal.signal(signal.SIGUSR1, leave)
            threading.Thread(target=interrupt_when_it_waits, args=(pair,)).start()
            try:
                drives(pair.comm)
            except raised:
                continue
            raise AssertionError(f"{raised} was lost")

    # The other rank never comes; the handler finds no communicator, and ends the process's wait.
    with Pair() as pair:
        signal.signal(signal.SIGUSR1, lambda *_: leave_for_good(pair))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            gradring.Communicator(0, 2, f"127.0.0.1:{free_ports(1)[0]}")
        except SystemExit:
            return
    raise AssertionError("the start went on")


def leave_for_good(pair: Pair) -> None:
    pair.comm.close()
    raise SystemExit


def interrupt_when_it_waits(pair: Pair) -> None:
    pair.wait_until_rank_0_waits()
    os.kill(os.getpid(), signal.SIGUSR1)


def test_finalizers_storms_of_signals_and_handlers_that_raise() -> None:
    run_ranks(others, 1)


@pytest.mark.parametrize("outer", marked(OUTERS, QUICK))
def test_a_handler_may_end_the_call_that_it_interrupts_and_may_not_call_a_collective(
    outer: str,
) -> None:
    assert run_ranks(every_handler, 1, outer) == [[]]
