"""Arrays in memory that all ranks of a host read."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradring
from gradring.errors import AbortedError, ConfigError, MismatchError, PeerLostError
from gradring.testing import run_ranks
from support.pairs import Pair, on_threads, with_communicator

Array = np.ndarray[Any, Any]

#: Elements of float32 that are read where they are, in a group of any size.
LARGE = 100_003


def algorithm(comm: gradring.Communicator) -> str:
    """The algorithm of the last all-reduce."""
    return comm.stats()["collectives"]["all_reduce"]["algorithm"]


def reduced_by_each_form(comm: gradring.Communicator) -> list[str]:
    x = comm.empty((LARGE,))
    start = np.arange(LARGE, dtype=np.float32) % 1000 + comm.rank
    expected = start * comm.world_size + sum(range(comm.world_size)) - comm.rank * comm.world_size
    plan = comm.prepare(x)
    forms: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce_async(x).wait(),
        plan,
        lambda: plan.start().wait(),
    ]
    used = []
    for form in forms:
        x[:] = start
        assert form() is x
        assert (x == expected).all()
        used.append(algorithm(comm))
    return used


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_form_of_an_all_reduce_reads_arrays_where_they_are(world_size: int) -> None:
    found = on_threads(world_size, reduced_by_each_form, transport="shm")
    assert found == [["mapped"] * 4] * world_size


def test_processes_read_each_others_arrays() -> None:
    found = run_ranks(with_communicator, 3, reduced_by_each_form)
    assert found == [["mapped"] * 4] * 3


@pytest.mark.parametrize("settings", [{"transport": "tcp"}, {"checksum": True}])
def test_a_group_without_common_memory_has_ordinary_arrays(settings: dict[str, Any]) -> None:
    found = on_threads(2, reduced_by_each_form, **settings)
    assert "mapped" not in {name for names in found for name in names}


@pytest.mark.parametrize(
    "settings", [{"algorithm": "ring"}, {"wire_dtype": "bfloat16"}, {"reproducible": True}]
)
def test_settings_decide_on_all_ranks_alike(settings: dict[str, Any]) -> None:
    def run(comm: gradring.Communicator) -> str:
        x = comm.empty(LARGE)
        x[:] = 1.0
        assert (comm.all_reduce(x) == 2.0).all()
        return algorithm(comm)

    reads = "reproducible" in settings
    names = on_threads(2, run, transport="shm", **settings)
    assert [name == "mapped" for name in names] == [reads] * 2


def test_arrays_are_what_was_asked_for() -> None:
    dtypes = [*map(np.dtype, ("f4", "f8", "f2", "i4", "i8", "u1")), np.dtype(ml_dtypes.bfloat16)]

    def run(comm: gradring.Communicator) -> None:
        for dtype in dtypes:
            for shape in (3, (), (0,), (2, 0, 3), [2, 3], (np.int64(2),)):
                x = comm.empty(shape, dtype)
                assert type(x) is np.ndarray and x.dtype == dtype
                assert x.shape == np.empty(shape).shape
                assert x.flags.carray and not x.astype("f8").any()
                x[...] = 3
                assert (x == dtype.type(3)).all()
        assert comm.empty(2).dtype == np.float32
        assert comm.empty(2, "bfloat16").dtype == ml_dtypes.bfloat16
        unsupported: list[Any] = ["complex64", ">f4", "int16", object]
        for dtype in unsupported:
            with pytest.raises(TypeError, match=r"not supported|dtype"):
                comm.empty(2, dtype)
        lengths: list[Any] = [1.5, "2", (2, None)]
        for shape in lengths:
            with pytest.raises(TypeError):
                comm.empty(shape)
        with pytest.raises(ValueError, match="negative"):
            comm.empty((2, -1))

    for transport in ("shm", "tcp"):
        on_threads(2, run, transport=transport)
    with gradring.Communicator(0, 1, "127.0.0.1:0") as alone:
        run(alone)


def test_an_array_that_is_too_large_is_an_error_and_no_ordinary_one() -> None:
    def run(comm: gradring.Communicator) -> None:
        for elements in (1 << 45, 1 << 80):
            with pytest.raises(ConfigError, match=r"no memory for .* of Communicator\.empty"):
                comm.empty(elements)
        x = comm.empty(LARGE)
        x[:] = 1.0
        assert comm.all_reduce(x)[-1] == 2.0
        assert algorithm(comm) == "mapped"

    on_threads(2, run, transport="shm")


def test_an_ordinary_array_that_is_too_large_is_the_same_error() -> None:
    with gradring.Communicator(0, 1, "127.0.0.1:0") as alone:
        for elements in (1 << 60, 1 << 61, 1 << 80):
            with pytest.raises(ConfigError, match=r"no memory for .* of Communicator\.empty"):
                alone.empty(elements)
        assert alone.empty((0, 1 << 40)).size == 0


def closed_without_arrays(comm: gradring.Communicator) -> tuple[int, int, int]:
    before = virtual_bytes()
    x = comm.empty(LARGE)
    mapped = virtual_bytes()
    comm.barrier()
    del x
    comm.close()
    return before, mapped, virtual_bytes()


def test_heaps_take_addresses_from_the_first_array_on() -> None:
    for before, mapped, after in run_ranks(with_communicator, 2, closed_without_arrays):
        # Not so much in a small container, but more than what else a process maps meanwhile.
        heaps = mapped - before
        assert heaps > 256 << 20
        assert after <= mapped - heaps / 2


def virtual_bytes() -> int:
    """Bytes of addresses that this process has mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_an_array_from_elsewhere_on_one_rank_is_an_error_on_all(odd: int) -> None:
    def run(comm: gradring.Communicator) -> str:
        x = np.ones(LARGE, np.float32) if comm.rank == odd else comm.empty(LARGE)
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(x, name="gradients")
        return str(caught.value)

    for text in on_threads(3, run, transport="shm"):
        assert f"rank {odd} on" in text
        assert "called all_reduce(sum) 'gradients' float32[100003]; the others" in text
        assert "float32[100003] in memory of Communicator.empty (ranks" in text
        assert "pass arrays of Communicator.empty on every rank or on none" in text


def test_views_count_and_lists_and_foreign_groups_do_not() -> None:
    def run(comm: gradring.Communicator) -> list[str]:
        # The places differ between the ranks.
        skipped = 1000 * comm.rank
        x = comm.empty(3 * LARGE)
        used = []
        with comm.split(0) as group:
            for of, array in (
                (comm, x[skipped : skipped + LARGE]),
                (comm, x[skipped : skipped + LARGE].reshape(-1, 1)),
                (comm, [x[:LARGE], x[LARGE : 2 * LARGE]]),
                (group, x),
                (group, group.empty(LARGE)),
                (comm, group.empty(LARGE)),
            ):
                each = array if isinstance(array, list) else [array]
                for part in each:
                    part[...] = 1.0
                of.all_reduce(array)
                assert all((part == 2.0).all() for part in each)
                used.append(algorithm(of))
        return used

    for names in on_threads(2, run, transport="shm"):
        assert [name == "mapped" for name in names] == [True, True, False, False, True, False]


def used_again(comm: gradring.Communicator) -> None:
    first = comm.empty(1 << 24)
    address = first.ctypes.data
    view = first[5:6]
    first[:] = 7.0
    before = shared_bytes()
    del first
    assert view[0] == 7.0
    del view
    assert shared_bytes() <= before - (48 << 20)
    again = comm.empty(1 << 24)
    assert again.ctypes.data == address and not again.any()
    comm.barrier()


def test_memory_of_arrays_is_used_again_and_given_back() -> None:
    run_ranks(with_communicator, 2, used_again)


def shared_bytes() -> int:
    """Resident shared memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def test_an_array_outlives_its_group() -> None:
    with Pair(transport="shm") as pair:
        x, y = pair.comm.empty(LARGE), pair.peer.empty(LARGE)
        x[:] = y[:] = 1.0
        work = pair.comm.all_reduce_async(x)
        pair.peer.all_reduce(y)
        work.wait()
        pair.comm.abort("the test ends")
        y += 1.0
        kept = pair.comm.empty(3)
    for comm in (pair.comm, pair.peer):
        with pytest.raises(AbortedError, match="closed"):
            comm.empty(1)
    x += 1.0
    kept[:] = 5.0
    assert (x == 3.0).all() and (y == 3.0).all() and (kept == 5.0).all()
    with Pair(transport="shm") as pair:
        z = np.ones(LARGE, np.float32)
        work = pair.comm.all_reduce_async(x)
        pair.peer.all_reduce(z)
        assert work.wait()[0] == 4.0
        assert algorithm(pair.comm) != "mapped"


def killed_between(comm: gradring.Communicator) -> str:
    x = comm.empty(1 << 22)
    for step in range(10_000):
        if comm.rank == 1 and step == 5:
            # In the middle of a call: the others wait, fold or copy.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            comm.all_reduce(x)
        except PeerLostError as error:
            assert not comm.empty(10).any()
            return f"{error.rank} {algorithm(comm)}"
    return "never"


def test_a_rank_that_is_killed_is_named_by_the_others() -> None:
    outcomes = run_ranks(with_communicator, 3, killed_between, check=False)
    assert [outcomes[rank].value for rank in (0, 2)] == ["1 mapped"] * 2


def test_a_fork_shares_arrays_and_frees_none() -> None:
    with Pair(transport="shm") as pair:
        x, y = pair.comm.empty(LARGE), pair.peer.empty(LARGE)
        x[:] = y[:] = 1.0
        child = os.fork()
        if not child:
            y[0] = 2.0
            del x
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert y[0] == 2.0
        work = pair.comm.all_reduce_async(x)
        pair.peer.all_reduce(y)
        assert work.wait()[:2].tolist() == [3.0, 2.0]
