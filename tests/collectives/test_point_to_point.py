"""Messages between two ranks alone, beside whatever the others do."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import COUNTS, DTYPES, contribution, same

import gradring
from gradring.errors import (
    AbortedError,
    CollectiveTimeoutError,
    GradringError,
    MismatchError,
    PeerLostError,
)
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks, simulated_hosts
from support.chosen import marked_rows
from support.pairs import on_threads, with_communicator
from support.rank_states import state, wait_until_all_others_wait, waits
from support.waiting import wait_until


def to_the_next_from_the_one_before(comm: gradring.Communicator) -> list[str]:
    """All dtypes and sizes around the ring, also beside an all-reduce; what went wrong."""
    wrong = []
    rank, size = comm.rank, comm.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for count in COUNTS:
            sent, received = (
                contribution(rank, count, "sum", dtype),
                contribution(9, count, "sum", dtype),
            )
            untouched = sent.copy()
            work = comm.send_async(sent, after, name="x")
            total = comm.all_reduce(1)
            returned = comm.recv(received, before, name="x")
            expected = contribution(before, count, "sum", dtype)
            if not (
                work.wait() is None
                and returned is received
                and total == size
                and same(received, expected)
                and same(sent, untouched)
            ):
                wrong.append(f"{dtype} {count}")
    return wrong


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "tcp"},
        {"transport": "shm"},
        {"transport": "tcp", "streams": 3},
        {"checksum": True},
        {"transport": "tcp", "streams": 2, "checksum": True},
    ],
    ids=str,
)
def test_every_dtype_and_size_arrives(settings: dict[str, Any]) -> None:
    assert on_threads(3, to_the_next_from_the_one_before, **settings) == [[]] * 3


def test_every_dtype_and_size_arrives_between_hosts() -> None:
    with simulated_hosts(2) as hosts:
        wrong = run_ranks(with_communicator, 3, to_the_next_from_the_one_before, hosts=hosts)
    assert wrong == [[]] * 3


def many_at_a_time(comm: gradring.Communicator) -> list[int]:
    """Every rank sends every other one several arrays; each arrives in its order."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    works = [
        comm.send_async(np.full(1000, 100 * comm.rank + number), to)
        for number in range(5)
        for to in others
    ]
    # Not in the order in which they are sent.
    received = {source: [np.empty(1000, np.int64) for _ in range(5)] for source in others[::-1]}
    for source, arrays in received.items():
        for number, array in enumerate(arrays):
            comm.recv(array, source)
            assert (array == 100 * source + number).all()
    for work in works:
        work.wait()
    counted = comm.stats()["collectives"]
    return [int(counted[name]["count"]) for name in ("send", "recv")]


def test_arrays_between_two_ranks_keep_their_order_and_wait_for_no_others() -> None:
    assert on_threads(4, many_at_a_time) == [[15, 15]] * 4


def what_may_be_sent(comm: gradring.Communicator) -> None:
    read_only: Any = np.arange(6.0)
    read_only.flags.writeable = False
    turned = np.arange(6.0).reshape(2, 3).T
    bucket = [np.ones(2), np.full((2, 2), 7.0)]
    if comm.rank == 0:
        for x in (read_only, turned, memoryview(read_only), 2.5, bucket, np.float32(3)):
            comm.send(x, np.int64(1))
        return
    assert (comm.recv(np.empty(6), 0) == np.arange(6.0)).all()
    assert (comm.recv(np.empty((3, 2)), 0) == turned).all()
    assert (comm.recv(np.empty(6), 0) == np.arange(6.0)).all()
    assert comm.recv(np.empty(()), np.int64(0)) == 2.5
    received = comm.recv([np.empty(2), np.empty((2, 2))], 0)
    assert (received[0] == 1).all() and (received[1] == 7).all()
    assert comm.recv(np.empty((), np.float32), 0) == 3


def test_arrays_of_any_layout_numbers_and_buckets_can_be_sent() -> None:
    on_threads(2, what_may_be_sent)


def one_array_for_all(comm: gradring.Communicator) -> None:
    """The same memory may be sent several times at once, and not received into meanwhile."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    x = np.full(100_000, comm.rank)
    works = [comm.send_async(part, to) for to in others for part in (x, x[:7], x)]
    with pytest.raises(ValueError, match="under way"):
        comm.recv(x[50:60], others[0])
    with pytest.raises(ValueError, match="under way"):
        comm.all_reduce_async(x)
    for source in others:
        for count in (100_000, 7, 100_000):
            assert (comm.recv(np.empty(count, np.int64), source) == source).all()
    for work in works:
        work.wait()
    gathered = [comm.gather_async(x, root=root) for root in range(comm.world_size)]
    assert sum(part.wait() is not None for part in gathered) == 1
    comm.all_reduce_async(x).wait()


def test_one_array_can_be_sent_to_several_at_a_time() -> None:
    on_threads(3, one_array_for_all)


def refused(comm: gradring.Communicator) -> None:
    x = np.ones(3)
    partner: Any
    for partner, why in (
        (comm.rank, "is this rank itself"),
        (2, "is not a rank of a world of 2"),
        (-1, "is not a rank"),
        (1.0, "choose another rank"),
        ("1", "choose another rank"),
        (None, "choose another rank"),
    ):
        for call in (comm.send, comm.send_async, comm.recv, comm.recv_async):
            with pytest.raises(ValueError, match=why):
                call(x, partner)
    with pytest.raises(TypeError):
        comm.recv(1.0, 1 - comm.rank)
    with pytest.raises(TypeError, match="complex128"):
        comm.send(np.ones(3, complex), 1 - comm.rank)
    read_only = np.ones(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        comm.recv(read_only, 1 - comm.rank)
    comm.all_reduce(x)  # nothing has been sent


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    on_threads(2, refused)
    with (
        gradring.Communicator(rank=0, world_size=1) as comm,
        pytest.raises(ValueError, match="this rank itself"),
    ):
        comm.send(np.ones(3), 0)


def differing(comm: gradring.Communicator, expected: Any, name: str) -> str:
    """The receiver expects something else than six float64 of name a."""
    if comm.rank == 0:
        time.sleep(0.2)  # a rank that does neither is told, too
        with pytest.raises(GradringError) as caught:
            comm.barrier()
    else:
        with pytest.raises(GradringError) as caught:
            if comm.rank == 1:
                comm.send(np.ones(6), 2, name="a")
            else:
                comm.recv(expected, 1, name=name)
    error = caught.value
    assert isinstance(error, MismatchError) and error.rank == 2, error
    return str(error)


@pytest.mark.parametrize(
    ("expected", "name", "told"),
    [
        (np.ones(6, np.float32), "a", "recv(source=1) 'a' float32[6]"),
        (np.ones(7), "a", "recv(source=1) 'a' float64[7]"),
        (np.ones((2, 3)), "a", "recv(source=1) 'a' float64[2,3]"),
        (np.ones(6), "b", "recv(source=1) 'b' float64[6]"),
    ],
    ids=["dtype", "count", "shape", "name"],
)
def test_a_send_and_a_recv_that_differ_are_told_on_every_rank(
    expected: Any, name: str, told: str
) -> None:
    for message in on_threads(3, partial(differing, expected=expected, name=name)):
        sent = "send(dest=2) 'a' float64[6]"
        assert told in message and sent in message and "(rank 1)" in message, message


def differs_from_one_that_tells_nothing() -> Any:
    """Rank 0 has sent, and is stopped before it can see that rank 1 receives something else."""
    comm = gradring.init()
    x = np.ones(3)
    pid = int(comm.all_gather(np.array([os.getpid()]))[0])
    comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)  # from here on there is a link
    if comm.rank == 0:
        comm.send(x, 1, name="a")
    wait_until(lambda: waits(None, "send"), "rank 0 has sent")
    os.kill(pid, signal.SIGSTOP)
    try:
        comm.recv(np.ones(4), 0, name="b")
    except GradringError as error:
        return type(error).__name__, error.rank, str(error)
    finally:
        os.kill(pid, signal.SIGKILL)
    return "nothing"


def test_a_difference_is_told_though_the_other_one_is_not_there_to_tell_it() -> None:
    _, outcome = run_ranks(differs_from_one_that_tells_nothing, 2, check=False)
    kind, rank, message = outcome.value
    assert (kind, rank) == ("MismatchError", 1), outcome
    assert "rank 1 on" in message and "called recv(source=0) 'b' float64[4]" in message, message
    assert "send(dest=1) 'a' float64[3] (rank 0)" in message, message


def end(comm: gradring.Communicator, how: str, sends: bool, x: Any) -> None:
    """What rank 1 does while rank 0 sends to it, or receives from it."""
    if how == "struck":  # in the middle of 48 MiB
        comm.recv_async(x, 0) if sends else comm.send_async(x, 0)
        time.sleep(0.003)
    if how in ("killed", "struck"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        with pytest.raises(ZeroDivisionError), comm:
            raise ZeroDivisionError("by purpose")
    comm.close()


def partner_ends(how: str, sends: bool, used: bool) -> Any:
    """What the other ranks see."""
    comm = gradring.init()
    x = np.ones(12 << 20, np.float32)
    if used and comm.rank < 2:
        comm.send(x[:9], 1) if comm.rank == 0 else comm.recv(x[:9], 0)
        comm.recv(x[:9], 1) if comm.rank == 0 else comm.send(x[:9], 0)
    try:
        comm.barrier()
        if comm.rank == 1:
            return end(comm, how, sends, x)
        if comm.rank == 0:
            comm.send(x, 1) if sends else comm.recv(x, 1)
            comm.barrier()  # where a rank is told that had done its part
        else:
            comm.recv(x, 0)  # which never comes
    except GradringError as error:
        return type(error).__name__, error.rank
    finally:
        comm.close()
    return "nothing"


ENDS = {
    "killed": "PeerLostError",
    "struck": "PeerLostError",
    "raises": "AbortedError",
    "leaves": "PeerLostError",
}
#: How, whether rank 0 sends, and whether it did before: each end once, half of them so.
QUICK_ENDS = [
    ("killed", True, False),
    ("struck", True, True),
    ("raises", False, False),
    ("leaves", False, True),
]


@pytest.mark.parametrize(
    ("how", "sends", "used"),
    marked_rows(itertools.product(ENDS, (False, True), (False, True)), QUICK_ENDS),
)
def test_the_end_of_a_partner_is_told(how: str, sends: bool, used: bool) -> None:
    kind = ENDS[how]
    outcomes = run_ranks(partner_ends, 3, how, sends, used, check=False)
    for rank in (0, 2):
        assert outcomes[rank].value == (kind, 1), outcomes[rank]


def waits_in_vain(sends: bool) -> Any:
    """Rank 1 lives, but does not take part."""
    with gradring.init(stall_timeout=2.0) as comm:
        if comm.rank == 1:
            own, _ = state()["members"][1]
            wait_until(lambda: state(own)["failed"] is not None, "this rank has heard of it")
        with pytest.raises(CollectiveTimeoutError) as caught:
            if comm.rank == 1:
                comm.barrier()
            elif comm.rank == 0:
                comm.send(np.ones(3), 1) if sends else comm.recv(np.ones(3), 1)
            else:
                comm.recv(np.ones(3), 0)
        return caught.value.rank, caught.value.collective


@pytest.mark.parametrize("sends", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_partner_that_does_not_come_is_named(sends: bool) -> None:
    calls = ["send(dest=1) float64[3]" if sends else "recv(source=1) float64[3]", "barrier"]
    assert run_ranks(waits_in_vain, 2, sends) == [(1, call) for call in calls]


def waits_with_patience(sends: bool) -> str:
    """A wait ends in time, and what it waited for goes on."""
    with gradring.init() as comm:
        x = np.full(3, comm.rank)
        if comm.rank == 1:
            time.sleep(1)
            comm.recv(x, 0) if sends else comm.send(x, 0)
            return ""
        work: Any = comm.send_async(x, 1) if sends else comm.recv_async(x, 1)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(timeout=0.1)
        assert caught.value.rank is None
        work.wait()
        assert work.done()
        assert sends or (x == 1).all()
        return str(caught.value.collective)


@pytest.mark.parametrize("sends", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_wait_may_end_before_its_send_or_recv(sends: bool) -> None:
    assert ("dest=1" if sends else "source=1") in run_ranks(waits_with_patience, 2, sends)[0]


def interrupted(directory: Path) -> str:
    """Rank 0 waits for what never comes, and gets a signal from itself."""
    with gradring.init() as comm:
        if comm.rank == 1:
            wait_until(lambda: (directory / "waits").exists(), "rank 0 waits")
            with pytest.raises(AbortedError) as caught:
                comm.barrier()
            return str(caught.value)

        def interrupt() -> None:
            wait_until(lambda: waits(None, "recv"), "rank 0 waits")
            (directory / "waits").touch()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            comm.recv(np.ones(3), 1)
        return "interrupted"


def test_a_recv_can_be_interrupted_and_its_rank_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(interrupted, 2, tmp_path)
    assert first == "interrupted" and "rank 0 on" in second and "was interrupted" in second


def all_send_first() -> Any:
    """Each rank sends to the next one, and nobody receives."""
    with gradring.init(stall_timeout=5.0) as comm:
        with pytest.raises(CollectiveTimeoutError) as caught:
            comm.send(np.ones(3), (comm.rank + 1) % comm.world_size)
        return str(caught.value)


def test_a_circle_of_sends_is_called_one() -> None:
    for message in run_ranks(all_send_first, 3):
        circle = r"waits in a circle: ranks [012], [012] and [012] wait for each other"
        assert re.search(circle, message)
        assert "send_async" in message


def closes_beside_one_that_is_stopped() -> float:
    """Rank 0 expects a connection from rank 1, which is stopped, and leaves."""
    comm = gradring.init()
    pid = int(comm.all_gather(np.array([os.getpid()]))[1])
    comm.barrier()
    if comm.rank == 1:
        time.sleep(60)
    os.kill(pid, signal.SIGSTOP)
    comm.recv_async(np.ones(3), 1)
    time.sleep(2.5)  # it is looked at by now
    started = time.monotonic()
    comm.close()
    took_s = time.monotonic() - started
    os.kill(pid, signal.SIGKILL)
    return took_s


def test_a_communicator_closes_beside_a_partner_that_is_stopped() -> None:
    outcome, _ = run_ranks(closes_beside_one_that_is_stopped, 2, check=False)
    assert outcome.value < 5, outcome  # the look itself may take 10 s


def closed_under_way() -> str:
    """Another thread closes the communicator while this one receives; and then nothing goes."""
    comm = gradring.init()
    if comm.rank == 0:
        closing = threading.Timer(0.5, comm.close)
        closing.start()
        with pytest.raises(AbortedError):
            comm.recv(np.ones(3), 1)
        with pytest.raises(AbortedError, match="closed"):
            comm.send(np.ones(3), 1)
        closing.join()
        before = threading.active_count()
        comm.close()
        assert threading.active_count() == before
        return "closed"
    with pytest.raises(PeerLostError) as caught:
        comm.barrier()
    comm.close()
    return str(caught.value)


def test_a_recv_ends_with_its_communicator() -> None:
    assert run_ranks(closed_under_way, 2)[0] == "closed"


def kept_though_closed(rendezvous: list[str]) -> list[int]:
    """Descriptors after each of several groups that were closed and are kept."""
    place = gradring.init()
    kept, open_then = [], []
    for address in rendezvous:
        comm = gradring.Communicator(place.rank, 2, address, transport="auto")
        x = np.ones(3)
        comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.recv_async(x, 1) if comm.rank == 0 else comm.send_async(x, 0)
        comm.barrier()
        comm.close()
        kept.append(comm)
        place.barrier()
        open_then.append(len(os.listdir("/proc/self/fd")))
        place.barrier()  # who counts first must not leave before the other has counted
    return open_then


def test_a_closed_communicator_keeps_no_descriptors_of_its_channels() -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(4)]
    for counts in run_ranks(kept_though_closed, 2, addresses):
        assert counts[1:] == [counts[0]] * 3, counts


def a_chain_waits(directory: Path) -> Any:
    """Rank 0 waits in a collective for rank 1, which waits for rank 2, which is to blame."""
    with gradring.init(stall_timeout=2.0) as comm:
        if comm.rank == 2:
            wait_until(lambda: (directory / "over").exists(), "rank 0 has an error")
        try:
            if comm.rank == 1:
                comm.recv(np.ones(3), 2)
            elif comm.rank == 0:
                address, _ = state()["members"][1]
                wait_until(lambda: waits(address, "recv"), "rank 1 waits for rank 2")
            comm.barrier()
        except CollectiveTimeoutError as error:
            return error.rank
        finally:
            if comm.rank == 0:
                (directory / "over").touch()
    return "nothing"


def test_who_waits_for_a_partner_is_not_to_blame_for_a_collective(tmp_path: Path) -> None:
    assert run_ranks(a_chain_waits, 3, tmp_path) == [2, 2, 2]


def sends_to_one_in_a_collective() -> Any:
    """Rank 0 has gone on to a collective, and rank 1 has waited longer for it to receive."""
    with gradring.init(stall_timeout=2.0) as comm:
        if comm.rank == 0:
            wait_until_all_others_wait(0, "send")
        with pytest.raises(CollectiveTimeoutError) as caught:
            if comm.rank == 1:
                comm.send(np.ones(3), 0, name="a")
            else:
                comm.all_reduce(np.ones(3))
        return caught.value.rank, str(caught.value)


def test_who_sends_to_a_rank_that_is_in_a_collective_is_to_blame() -> None:
    for rank, message in run_ranks(sends_to_one_in_a_collective, 2):
        told = "is in send(dest=0) 'a' float64[3] and has not entered this collective"
        assert rank == 1 and told in message, message


def traced(path: Path) -> None:
    with gradring.init() as comm:
        comm.trace_start(path)
        x = np.ones(1000)
        for _ in range(3):
            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        comm.all_reduce(x)
        comm.trace_stop()


def test_a_timeline_has_a_track_for_each_partner(tmp_path: Path) -> None:
    run_ranks(traced, 2, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    tracks = {
        (event["pid"], event["args"]["name"]): event["tid"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert {(0, "send to rank 1"), (1, "recv from rank 0")} < tracks.keys()
    for (rank, track), call in {
        (0, "send to rank 1"): "send(dest=1) float64[1000]",
        (1, "recv from rank 0"): "recv(source=0) float64[1000]",
    }.items():
        slices = [e for e in events if (e["pid"], e["tid"]) == (rank, tracks[rank, track])]
        assert sum(e["name"] == call for e in slices) == 3
        assert all(e["name"] != "waiting for rank 1" for e in slices) or rank == 0


def in_a_group_of_a_group(comm: gradring.Communicator) -> None:
    """A group that was split off has channels of its own."""
    group = comm.split(comm.rank % 2)
    assert group is not None
    with group:
        x = np.full(3, comm.rank)
        if group.rank == 0:
            group.send(x, 1)
            comm.send(x, (comm.rank + 2) % 4)
        else:
            from_world = np.empty(3, np.int64)
            work = comm.recv_async(from_world, (comm.rank + 2) % 4)
            assert (group.recv(np.empty(3, np.int64), 0) == comm.rank - 2).all()
            assert (work.wait() == comm.rank - 2).all()


def test_groups_have_channels_of_their_own() -> None:
    on_threads(4, in_a_group_of_a_group)
