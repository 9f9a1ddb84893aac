"""The Python interface: what is accepted, what is refused, and what comes back."""

from __future__ import annotations

import array
import copy
import gc
import mmap
import os
import pickle
import queue
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradring
from gradring.config.values import Transport
from gradring.stats import AlgorithmStats, CollectiveStats, Stats
from gradring.testing import run_ranks
from support.pairs import Pair, on_threads, with_communicator
from support.rank_states import rank_0_waits
from support.waiting import wait_until


def gathered(comm: gradring.Communicator) -> list[Any]:
    numbers = comm.all_gather(np.int32(comm.rank))
    return [numbers.tolist(), comm.all_gather(np.full((comm.rank, 3), comm.rank)).tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_and_different_numbers_of_rows_are_gathered(world_size: int) -> None:
    numbers = list(range(world_size))
    rows = [[rank] * 3 for rank in numbers for _ in range(rank)]
    assert on_threads(world_size, gathered) == [[numbers, rows]] * world_size


def kinds_of_arguments(comm: gradring.Communicator) -> list[Any]:
    bucket = [np.ones((2, 3), np.float32), np.zeros(0, np.float32), np.full(5, 2, np.float32)]
    returned = comm.all_reduce(bucket)
    raw = bytearray([comm.rank + 1, 7])
    comm.all_reduce(raw)
    floats = array.array("f", [1.5, 2.5])
    comm.all_reduce(floats)
    zero_dimensional = np.array(3.0)
    comm.all_reduce(zero_dimensional)
    brain = np.array([1.5], ml_dtypes.bfloat16)
    comm.all_reduce(brain)
    return [
        returned is bucket,
        [part.tolist() for part in bucket],
        list(raw),
        floats.tolist(),
        float(zero_dimensional),
        float(brain[0]),
        comm.all_reduce(1.5),
        comm.all_reduce(2),
        comm.all_reduce(np.float32(0.5), op="mean"),
    ]


def test_buckets_buffers_and_numbers_are_reduced() -> None:
    expected = [
        True,
        [[[2, 2, 2], [2, 2, 2]], [], [4, 4, 4, 4, 4]],
        [3, 14],
        [3.0, 5.0],
        6.0,
        3.0,
        3.0,
        4,
        np.float32(0.5),
    ]
    assert on_threads(2, kinds_of_arguments) == [expected] * 2


def rounding(comm: gradring.Communicator) -> list[bool]:
    """16-bit sums of values that a 16-bit accumulator would round on the way."""
    checks = []
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        parts = [
            np.random.default_rng(rank).normal(size=4097).astype(dtype)
            for rank in range(comm.world_size)
        ]
        once = sum(part.astype(np.float64) for part in parts)
        x = parts[comm.rank].copy()
        comm.all_reduce(x)
        # Rounded once from float32: at most half a unit in the last place, plus float32's.
        error = np.abs(x.astype(np.float64) - once)
        ulp = np.maximum(np.abs(once), 2.0**-14) * float(ml_dtypes.finfo(dtype).eps)
        checks.append(bool((error <= 0.51 * ulp).all()))
    return checks


def test_sixteen_bit_floats_are_rounded_once() -> None:
    assert run_ranks(with_communicator, 4, rounding) == [[True, True]] * 4


def corrected(comm: gradring.Communicator) -> list[Any]:
    """Rank 0 passes what cannot travel, catches the error and passes something better."""
    results = []
    with pytest.raises(ValueError, match="has no 2 equal parts"):
        comm.all_to_all(np.ones(3))
    for collective in (
        comm.all_reduce,
        comm.reduce_scatter,
        comm.all_gather,
        comm.broadcast,
        comm.all_to_all,
    ):
        for wrong in (np.ones(2, bool), np.ones(2, ">i4")) if comm.rank == 0 else ():
            with pytest.raises(TypeError, match="not supported"):
                collective(wrong)
        results.append(collective(np.ones(2)).tolist())
    return results


def test_what_cannot_travel_is_refused_before_anything_does() -> None:
    assert on_threads(2, corrected) == [[[2, 2], [2], [1, 1, 1, 1], [1, 1], [1, 1]]] * 2


def gathered_differently() -> None:
    with gradring.init() as comm:
        if comm.rank == 0:
            comm.all_reduce(np.ones(2))
        else:
            comm.all_gather(np.ones(2))


def test_a_gather_without_a_name_is_shown_without_one() -> None:
    outcome = run_ranks(gathered_differently, 2, check=False)[0]
    assert isinstance(outcome.exception, gradring.errors.MismatchError), outcome
    assert "called all_gather 'lengths' int64[2]" in str(outcome.exception)


def asynchronous(gate: Path) -> list[Any]:
    """Rank 1 does nothing after the first works before ``gate`` exists."""
    with gradring.init() as comm:
        arrays = [np.full(1000, i, np.float32) for i in range(10)]
        works = [comm.all_reduce_async(x, name=f"w{i}") for i, x in enumerate(arrays)]
        returned = [work.wait(timeout=60.0) for work in works]
        assert all(a is b for a, b in zip(arrays, returned, strict=True))
        late = None
        if comm.rank == 0:
            x = np.ones(3)
            work = comm.all_reduce_async(x)
            try:
                work.wait(timeout=0.05)
            except gradring.errors.CollectiveTimeoutError as error:
                late = not work.done() and "goes on" in str(error)
            gate.touch()
            comm.all_gather(np.ones(1))
            assert work.done()
        else:
            wait_until(gate.exists, "rank 0 has waited in vain")
            comm.all_reduce(np.ones(3))
            comm.all_gather(np.ones(1))
        stats = comm.stats()
        return [
            [float(x[0]) for x in arrays],
            all(work.done() for work in works),
            late,
            stats["collectives"]["all_reduce"]["count"],
            stats["collectives"]["all_reduce"]["algorithm"],
            sorted(stats["lateness_s"]) == [1 - comm.rank],
        ]


def test_works_end_in_launch_order_and_a_wait_can_time_out_without_harm(tmp_path: Path) -> None:
    values = [2.0 * i for i in range(10)]
    results = run_ranks(asynchronous, 2, tmp_path / "gate")
    assert results[0] == [values, True, True, 11, "one_shot", True]
    assert results[1] == [values, True, None, 11, "one_shot", True]


def impatient(gate: Path) -> Any:
    """Rank 0 waits in several ways for rank 1, which does nothing before ``gate`` exists."""
    with gradring.init() as comm:
        if comm.rank == 1:
            wait_until(gate.exists, "rank 0 has waited in vain")
            for name in ("early", "w", "w"):
                comm.all_reduce(np.ones(3), name=name)
            return None
        works = [comm.all_reduce_async(np.ones(3), name=name) for name in ("early", "w", "w")]
        refused = []
        for timeout in (-1.0, float("nan")):
            try:
                works[1].wait(timeout)
            except ValueError as error:
                refused.append(str(error))
        try:
            works[1].wait(0)
        except gradring.errors.CollectiveTimeoutError as error:
            facts = error.rank, error.host, error.collective, error.sequence, str(error)
            counted = error.elapsed_s is not None and error.elapsed_s >= 0
        threading.Timer(0.3, gate.touch).start()
        for work, timeout in zip(works, (float("inf"), 1e30, 1e15), strict=True):
            work.wait(timeout)
        return refused, facts, counted


def test_a_wait_takes_every_time_and_says_what_is_not_over(tmp_path: Path) -> None:
    refused, facts, counted = run_ranks(impatient, 2, tmp_path / "gate")[0]
    assert ["-1" in refused[0], "NaN" in refused[1]] == [True, True]
    call = "all_reduce(sum) 'w' float64[3]"
    assert facts[:4] == (None, None, call, 2)
    assert facts[4].startswith(f"{call} (collective #2): has not ended within the 0 s of this wait")
    assert facts[4].endswith("it goes on: wait again, or ask gradring doctor for whom it waits")
    assert counted


def chosen(algorithm: str, transport: Transport) -> Stats:
    with gradring.init(algorithm=algorithm, transport=transport) as comm:
        comm.all_reduce(np.ones(10, np.float32))
        comm.all_reduce(np.ones(1 << 20, np.float32))
        comm.barrier()
        return comm.stats()


def test_stats_tell_which_algorithms_were_used_and_why() -> None:
    stats = run_ranks(chosen, 3, "auto", "tcp")[0]
    assert stats.keys() == Stats.__required_keys__
    assert stats["collectives"]["all_reduce"].keys() == CollectiveStats.__required_keys__
    assert stats["algorithms"]["direct"].keys() == AlgorithmStats.__required_keys__
    assert stats["algorithm"] == "one_shot"
    assert stats["collectives"]["all_reduce"]["algorithm"] == "direct"
    one_shot, direct = (stats["algorithms"].pop(name) for name in ("one_shot", "direct"))
    assert not stats["algorithms"]
    # Ten floats, and the one byte of a barrier.
    assert (one_shot["count"], one_shot["bytes"]) == (2, 41)
    assert (direct["count"], direct["bytes"]) == (1, 4 << 20)
    assert 0 < one_shot["latency_s"] < 60 and 0 <= direct["seconds_per_byte"] < 1
    assert one_shot["chosen"].startswith("up to 1 KiB: one packet")
    # What is more is chosen by measured times, which say what they like on a busy machine.
    latency = f"{one_shot['latency_s'] * 1e6:.1f} us"
    measured = re.search(r": measured (\S+ us) \+ ", one_shot["chosen"])
    assert measured is None or measured[1] == latency
    assert direct["chosen"].endswith(": at most 8 ranks")


def test_stats_tell_why_a_wish_was_not_granted() -> None:
    algorithms = run_ranks(chosen, 2, "hierarchical", "auto")[0]["algorithms"]
    hierarchical = algorithms["hierarchical"]
    assert (hierarchical["count"], hierarchical["latency_s"]) == (0, None)
    assert hierarchical["chosen"].startswith("never: it needs several hosts")


def test_stats_tell_the_congestion_control_and_why() -> None:
    for env in ({}, {"GRADRING_TCP_CONGESTION": ""}):
        stats = run_ranks(chosen, 2, "auto", "tcp", env=env)[0]
        assert stats["tcp_congestion"] == {"reno": "same host"}
    assert run_ranks(chosen, 2, "auto", "shm")[0]["tcp_congestion"] == {}
    system = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    env = {"GRADRING_TCP_CONGESTION": "system"}
    stats = run_ranks(chosen, 2, "auto", "tcp", env=env)[0]
    assert stats["tcp_congestion"] == {system: "GRADRING_TCP_CONGESTION"}
    env = {"GRADRING_TCP_CONGESTION": "nonsense"}
    stats = run_ranks(chosen, 2, "auto", "tcp", env=env)[0]
    assert stats["tcp_congestion"] == {system: "the system's, which does not allow nonsense"}


def test_variables_that_name_what_is_not_there_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADRING_TCP_CONGESTION", "system")
    monkeypatch.setenv("GRADRING_KERNEL", gradring.build_info()["instruction_set"])
    with _alone():
        assert caplog.messages == []
    used = gradring.build_info()["instruction_set"]
    other = "scalar" if used != "scalar" else "avx2"
    monkeypatch.setenv("GRADRING_TCP_CONGESTION", "nonsense")
    monkeypatch.setenv("GRADRING_KERNEL", other)
    with _alone():
        # Another thread writes them.
        wait_until(lambda: len(caplog.messages) == 2, "two warnings")
    kernel, congestion = sorted(caplog.messages)
    wrong = rf'GRADRING_KERNEL="{other}" is ignored, and {used} used; this .* has .*scalar'
    assert re.fullmatch(wrong, kernel)
    assert re.fullmatch(
        r'GRADRING_TCP_CONGESTION="nonsense" is ignored, because .* it has .*reno.*', congestion
    )


def test_an_unknown_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADRING_KERNEL", "avx1024")
    wrong = "GRADRING_KERNEL=.avx1024. is not one of avx512, avx2, scalar; correct it"
    with pytest.raises(gradring.errors.ConfigError, match=wrong):
        gradring.init()


def _alone() -> gradring.Communicator:
    return gradring.Communicator(rank=0, world_size=1)


def test_a_world_of_one_needs_no_network() -> None:
    with _alone() as comm:
        x = np.arange(5.0)
        assert comm.all_reduce(x, op="mean") is x
        assert x.tolist() == [0, 1, 2, 3, 4]
        assert comm.all_gather(x).tolist() == x.tolist()
        assert comm.reduce_scatter(x).tolist() == x.tolist()
        comm.barrier()
        assert (comm.rank, comm.world_size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)


_BIG_ENDIAN_BFLOAT16 = np.dtype(ml_dtypes.bfloat16).newbyteorder(">")


def _read_only() -> np.ndarray[Any, Any]:
    x = np.ones(3)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (_read_only(), ValueError, "read-only"),
        (np.ones((4, 4))[:, ::2], ValueError, "not C-contiguous"),
        (np.ones(3, np.complex64), TypeError, "complex64"),
        (np.ones(3, ">f4"), TypeError, "byte order"),
        (np.ones(3, _BIG_ENDIAN_BFLOAT16), TypeError, "bfloat16 in foreign byte order"),
        (np.ones(3, np.int8), TypeError, "int8"),
        (np.array(["a"]), TypeError, "str"),
        (np.ones(3, object), TypeError, "object"),
        (np.ones(3, [("a", "f4"), ("b", "f4")]), TypeError, "void64"),
        ([np.ones(3), np.ones(3, np.int32)], TypeError, "same dtype"),
        ([np.ones(3), [1.0]], TypeError, "not a writable buffer"),
        (b"abc", ValueError, "read-only"),
        ("abc", TypeError, "not a writable buffer"),
        (None, TypeError, "not a writable buffer"),
    ],
)
def test_input_that_cannot_be_reduced_is_refused(x: Any, error: type[Exception], says: str) -> None:
    with _alone() as comm:
        with pytest.raises(error, match=says):
            comm.all_reduce(x)
        with pytest.raises(error, match=says):
            comm.all_reduce_async(x)


def test_a_name_stays_on_its_line_and_tells_a_terminal_nothing() -> None:
    with Pair() as pair:
        work = pair.comm.all_reduce_async(np.ones(2), name="größe\n\x1b[2J\rrank 3: \x9b31m")
        with pytest.raises(gradring.errors.MismatchError) as caught:
            pair.peer.all_reduce(np.ones(2), name="other")
        with pytest.raises(gradring.errors.MismatchError):
            work.wait()
    assert r"'größe\n\u{1b}[2J\rrank 3: \u{9b}31m'" in str(caught.value)


@pytest.mark.parametrize("number", [2, 1.5, True, np.float32(0.5)])
def test_a_number_cannot_change_in_place(number: Any) -> None:
    with _alone() as comm:
        for collective in (comm.all_reduce_async, comm.broadcast):
            with pytest.raises(TypeError, match=r"a number \(.*\) cannot change in place"):
                collective(number)
        with pytest.raises(TypeError, match="cannot change in place"):
            comm.all_reduce([np.ones(1), number])


def test_arrays_that_share_memory_are_refused() -> None:
    with _alone() as comm:
        x = np.ones(10)
        with pytest.raises(ValueError, match="share memory"):
            comm.all_reduce([x[:6], x[5:]])


def test_kinds_of_arrays_that_are_plain_memory_are_reduced(tmp_path: Path) -> None:
    with Pair() as pair:
        mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=(2, 2))
        mapped[:] = 1
        for x in (mapped, np.ones((2, 2)).view(np.matrix)):
            other = pair.peer.all_reduce_async(np.ones((2, 2)))
            assert pair.comm.all_reduce(x) is x
            assert x.tolist() == [[2, 2], [2, 2]]
            other.wait()
        with pytest.raises(ValueError, match="read-only"):
            pair.comm.all_reduce(np.memmap(tmp_path / "x", np.float64, "r"))


def test_arrays_of_a_work_under_way_are_left_alone() -> None:
    with Pair() as pair:
        x = np.ones(10)
        work = pair.comm.all_reduce_async(x[2:6])
        for comm in (pair.comm, pair.peer):
            for again in (x, x[5:], [np.ones(10), x[:3]]):
                for collective in (comm.all_reduce, comm.all_reduce_async, comm.broadcast):
                    with pytest.raises(
                        ValueError, match="shares memory with one of an asynchronous"
                    ):
                        collective(again)
        other = pair.peer.all_reduce_async(y := np.ones(4))
        assert work.wait().tolist() == other.wait().tolist() == [2] * 4
        works = [c.all_reduce_async(z) for c, z in ((pair.comm, x[2:6]), (pair.peer, y))]
        assert [work.wait().tolist() for work in works] == [[4] * 4] * 2
        assert x.tolist() == [1, 1, 4, 4, 4, 4, 1, 1, 1, 1]


#: Memory of ten numbers, what takes it away, and how its owner refuses that.
OWNERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], type[Exception]]] = {
    "numpy": (lambda: np.zeros(10, np.uint8), lambda x: x.resize(20), ValueError),
    "array": (lambda: array.array("B", bytes(10)), lambda x: x.append(1), BufferError),
    "bytearray": (lambda: bytearray(10), lambda x: x.append(1), BufferError),
    "mmap": (lambda: mmap.mmap(-1, 10), lambda x: x.close(), BufferError),
}


@pytest.mark.parametrize("kind", OWNERS)
@pytest.mark.parametrize("is_view", [False, True], ids=["itself", "a view"])
def test_memory_of_a_work_under_way_cannot_be_taken_away(kind: str, is_view: bool) -> None:
    make, take_away, refusal = OWNERS[kind]
    with Pair() as pair:
        x = make()
        memoryview(x)[:] = bytes([1] * 10)
        work = pair.comm.all_reduce_async(memoryview(x)[:] if is_view else x)
        with pytest.raises(refusal):
            take_away(x)
        pair.peer.all_reduce(np.ones(10, np.uint8))
        work.wait()
        del work
        assert bytes(x[:10]) == b"\2" * 10
        if kind != "numpy":  # which counts those who look on here, too
            take_away(x)


def test_a_communicator_and_its_works_cannot_be_copied() -> None:
    with _alone() as comm:
        for thing in (comm, comm.all_reduce_async(np.ones(1))):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be pickled or copied"):
                    copied(thing)


def test_a_communicator_that_nobody_has_any_more_leaves_its_works() -> None:
    with Pair() as pair:
        work = pair.comm.all_reduce_async(np.ones(3))
        del pair.comm
        gc.collect()
        with pytest.raises(gradring.errors.AbortedError, match="was closed while"):
            work.wait()
        with pytest.raises(gradring.errors.GradringError):
            pair.peer.barrier()
        pair.comm = pair.peer


def test_threads_that_mix_their_collectives_fail_on_all_ranks() -> None:
    with Pair() as pair:
        failed = []

        def reduce() -> None:
            try:
                pair.comm.all_reduce(np.ones(3), name="first")
            except gradring.errors.GradringError as error:
                failed.append(error)

        thread = threading.Thread(target=reduce)
        thread.start()
        pair.wait_until_rank_0_waits()
        for collective in (pair.comm.barrier, pair.peer.barrier):
            with pytest.raises(gradring.errors.GradringError) as caught:
                collective()
            failed.append(caught.value)
        thread.join()
        for error in failed:
            assert type(error) is gradring.errors.GradringError
            assert error.rank == 0
            for part in (
                "one thread called barrier",
                "inside all_reduce(sum) 'first'",
                "one thread,",
            ):
                assert part in str(error)


def test_threads_may_wait_for_each_others_works_and_close() -> None:
    with Pair() as pair:
        works: queue.Queue[Any] = queue.Queue()

        def wait() -> None:
            for _ in range(20):
                works.get().wait()

        waiting = [threading.Thread(target=wait) for _ in range(2)]
        for thread in waiting:
            thread.start()
        for _ in range(20):
            for comm in (pair.comm, pair.peer):
                works.put(comm.all_reduce_async(np.ones(3)))
        for thread in waiting:
            thread.join()
        closing = [threading.Thread(target=pair.comm.close) for _ in range(4)]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def test_a_timeout_may_be_longer_than_any_clock() -> None:
    for timeout in (1e19, 1.8e19, 1e300):
        with Pair(timeout=timeout) as pair:
            other = pair.peer.all_reduce_async(np.ones(1))
            assert pair.comm.all_reduce(np.ones(1))[0] == 2
            other.wait(timeout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 2, "world_size": 2, "rendezvous": "127.0.0.1:1"}, "rank=2"),
        ({"rank": -1, "world_size": 1}, "rank=-1"),
        ({"rank": "0", "world_size": 1}, "rank='0'"),
        ({"rank": 0, "world_size": 2}, "rendezvous"),
        ({"rank": 0, "world_size": 1, "timeout": 0.0}, "timeout"),
        ({"rank": 0, "world_size": 1, "timeout": float("nan")}, "timeout"),
        ({"rank": 0, "world_size": 1, "transport": "carrier pigeon"}, "transport"),
        ({"rank": 0, "world_size": 1, "algorithm": "tree"}, "algorithm"),
        ({"rank": 0, "world_size": 1, "algorithm": "direct:8MB"}, "has no size"),
        ({"rank": 0, "world_size": 1, "algorithm": ["ring"]}, "is no text"),
        ({"rank": 0, "world_size": 1, "stall_warning": 0}, "stall_warning"),
        ({"rank": 0, "world_size": 1, "reproducible": "yes"}, "reproducible"),
        ({"rank": 0, "world_size": 1, "wire_dtype": "float32"}, "wire_dtype"),
        ({"rank": 0, "world_size": 1, "streams": 0}, "streams"),
        ({"rank": 0, "world_size": 1, "streams": 17}, "streams"),
        ({"rank": 0, "world_size": 1, "checksum": "crc"}, "checksum"),
        ({"rank": 0, "world_size": 1, "checksum": np.array([1, 2])}, r"checksum=array\(\[1, 2\]\)"),
        ({"rank": 0, "world_size": 1, "transport": np.array(["tcp"] * 2)}, r"transport=array\("),
        ({"rank": 0, "world_size": 1, "tls": 1}, "tls=1 is not"),
        ({"rank": 0, "world_size": 1, "interface": "eth99"}, "interface='eth99' is neither"),
        ({"rank": 0, "world_size": 1, "ports": (0, 70000)}, "ports='0-70000' is neither"),
        ({"rank": 0, "world_size": 1, "announce": "h"}, "announce='h' is not host:port"),
        ({"rank": 0, "world_size": 2, "rendezvous": "h"}, "rendezvous='h' is not host:port"),
        (
            {
                **{"rank": 0, "world_size": 65, "rendezvous": "h:1", "reproducible": True},
                "transport": "shm",
            },
            "64 ranks",
        ),
    ],
)
def test_settings_that_cannot_work_are_config_errors(arguments: Any, says: str) -> None:
    with pytest.raises(gradring.errors.ConfigError, match=says):
        gradring.Communicator(**arguments)


def test_what_init_takes_a_communicator_takes_too() -> None:
    settings: Any = {"token": "text", "timeout": "5", "checksum": 1, "reproducible": 1}
    with gradring.Communicator(0, 1, **settings) as comm:
        assert comm.stats()["checksum"] is True


def test_an_unknown_op_is_a_value_error() -> None:
    said = 'op="average" is none of sum, mean, .*; did you mean mean?'
    with _alone() as comm, pytest.raises(ValueError, match=said):
        comm.all_reduce(np.ones(2), op="average")  # type: ignore[arg-type]


def test_a_closed_communicator_says_so() -> None:
    comm = _alone()
    comm.close()
    comm.close()
    with pytest.raises(gradring.errors.AbortedError, match="closed"):
        comm.all_reduce(np.ones(2))


def others_run_while_one_waits(gate: Path) -> None:
    """Rank 1 comes once a thread of rank 0 has run beside one that waits in the collective."""
    with gradring.init() as comm:
        waiting = threading.Thread(target=comm.all_reduce, args=(np.ones(3),))
        if comm.rank == 1:
            wait_until(gate.exists, "rank 0 has waited")
            waiting.start()
        else:
            waiting.start()
            wait_until(rank_0_waits, "rank 0 waits")
            gate.touch()
        waiting.join()


def test_the_interpreter_is_free_while_a_collective_waits(tmp_path: Path) -> None:
    run_ranks(others_run_while_one_waits, 2, tmp_path / "gate")


def interrupted(gate: Path) -> str:
    """Rank 1 does nothing before ``gate`` exists.

    What rank 0 had sent of its first collective may still be enough for rank 1.
    """
    comm = gradring.init()
    if comm.rank == 0:

        def interrupt() -> None:
            wait_until(rank_0_waits, "rank 0 waits")
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt).start()
    else:
        wait_until(gate.exists, "rank 0 was interrupted")
    try:
        for _ in range(2):
            comm.all_reduce(np.ones(3))
    except KeyboardInterrupt:
        gate.touch()
        return "KeyboardInterrupt"
    except gradring.errors.AbortedError as error:
        return f"rank {error.rank} interrupted" if "interrupted" in str(error) else str(error)
    return "nothing"


def test_ctrl_c_ends_a_waiting_collective_and_tells_the_others(tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, tmp_path / "gate") == [
        "KeyboardInterrupt",
        "rank 0 interrupted",
    ]
