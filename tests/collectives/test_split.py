"""Groups that some ranks of a group form: their ranks, their independence, their failures."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import AuthenticationError, ConfigError, MismatchError, PeerLostError
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks, simulated_hosts
from support.pairs import on_threads, with_communicator
from support.waiting import wait_until


def places(comm: gradring.Communicator, colors: list[int | None], keys: list[int]) -> Any:
    group = comm.split(colors[comm.rank], keys[comm.rank])
    comm.barrier()
    if group is None:
        return None
    with group:
        ranks = group.all_gather(np.array([comm.rank])).tolist()
        return [group.rank, group.world_size, ranks]


@pytest.mark.parametrize(
    ("colors", "keys", "expected"),
    [
        ([0, 0, 0, 0], [0] * 4, [[r, 4, [0, 1, 2, 3]] for r in range(4)]),
        ([0, 0, 0], [3, 1, 2], [[2, 3, [1, 2, 0]], [0, 3, [1, 2, 0]], [1, 3, [1, 2, 0]]]),
        (
            [7, -1, 7, -1, None],
            [0, 5, 0, 4, 0],
            [[0, 2, [0, 2]], [1, 2, [3, 1]], [1, 2, [0, 2]], [0, 2, [3, 1]], None],
        ),
        ([0, 1, 2], [0] * 3, [[0, 1, [r]] for r in range(3)]),
        ([None, None], [0, 0], [None, None]),
        ([5], [0], [[0, 1, [0]]]),
        ([np.int64(2**40)] * 2, [np.uint8(1), np.uint8(0)], [[1, 2, [1, 0]], [0, 2, [1, 0]]]),
    ],
    ids=str,
)
def test_ranks_of_one_color_are_a_group_in_the_order_of_their_keys(
    colors: list[int | None], keys: list[int], expected: list[Any]
) -> None:
    assert on_threads(len(colors), partial(places, colors=colors, keys=keys)) == expected


def rows_and_columns(directory: Path) -> list[Any]:
    """A grid of two by two; rank 3 does nothing in its column before rank 0's has reduced a lot."""
    with gradring.init() as comm:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        assert row is not None and column is not None
        with row, column:
            done = directory / "done"
            if comm.rank == 3:
                wait_until(done.exists, "the other column has reduced")
            for _ in range(100):
                total = column.all_reduce(np.full(1000, comm.rank))
            if comm.rank == 0:
                done.touch()
            of_row = row.all_reduce_async(np.array([comm.rank]))
            of_all = comm.all_reduce(1)
            return [int(total[0]), int(of_row.wait()[0]), of_all, row.split(0) is not None]


def test_groups_reduce_at_the_same_time_and_one_does_not_wait_for_another(tmp_path: Path) -> None:
    results = run_ranks(rows_and_columns, 4, tmp_path)
    assert results == [[2, 1, 4, True], [4, 1, 4, True], [2, 5, 4, True], [4, 5, 4, True]]


def outlived() -> list[int]:
    with gradring.init() as comm:
        group = comm.split(comm.rank % 2)
    assert group is not None
    with group:
        return [int(group.all_reduce(1)), group.broadcast_object(comm.rank)]


def test_a_group_outlives_the_one_that_it_was_made_from() -> None:
    assert run_ranks(outlived, 4) == [[2, 0], [2, 1]] * 2


def lost(directory: Path) -> Any:
    """Rank 3 dies while it is in a group with rank 1 alone."""
    comm = gradring.init()
    group = comm.split(comm.rank % 2)
    assert group is not None
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank % 2 == 0:
        return int(group.all_reduce(comm.rank))
    with pytest.raises(PeerLostError) as caught:
        group.all_reduce(np.ones(3))
    return caught.value.rank


def test_a_lost_rank_ends_the_groups_that_it_is_in_alone() -> None:
    outcomes = run_ranks(lost, 4, Path(), check=False)
    assert [outcome.value for outcome in outcomes[:3]] == [2, 1, 2]


def lost_before_it_joins(directory: Path) -> Any:
    """Rank 3 is to be in a group with rank 1, and dies once all know that."""
    comm = gradring.init()
    exchange = comm.all_gather_object

    def exchange_and_die(*arguments: Any, **more: Any) -> list[Any]:
        said = exchange(*arguments, **more)
        (directory / str(comm.rank)).touch()
        if comm.rank == 3:
            wait_until(lambda: len(list(directory.iterdir())) == 4, "all have exchanged")
            os.kill(os.getpid(), signal.SIGKILL)
        return said

    comm.all_gather_object = exchange_and_die  # type: ignore[method-assign]
    if comm.rank % 2 == 0:
        group = comm.split(0)
        assert group is not None
        wait_until((directory / "told").exists, "rank 1 has been told")
        return int(group.all_reduce(1))
    with pytest.raises(PeerLostError, match="its process has ended") as caught:
        comm.split(1)
    (directory / "told").touch()
    return caught.value.rank


def test_a_rank_that_is_lost_before_it_joins_a_group_is_told_at_once(tmp_path: Path) -> None:
    """The timeout is that of forming, which nobody waits for."""
    env = {"GRADRING_TIMEOUT_S": "1000"}
    outcomes = run_ranks(lost_before_it_joins, 4, tmp_path, check=False, env=env)
    assert [outcome.value for outcome in outcomes[:3]] == [2, 3, 2]


def announced(address: str) -> str:
    rank = int(os.environ["GRADRING_RANK"])
    where = address if rank == 1 else None
    with gradring.init(listen=where, announce=where) as comm:
        with pytest.raises(ConfigError) as caught:
            comm.split(0)
        comm.barrier()
        return str(caught.value)


def test_a_rank_behind_a_forwarded_port_cannot_be_in_another_group() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    says = f"split: rank 1 is announced at {address}, and nothing says where another port of it"
    for message in run_ranks(announced, 3, address):
        assert message.startswith(says)


def in_an_elastic_job() -> bool:
    from gradring.elastic import State, run

    with gradring.init() as comm:

        @run(comm, min_workers=2)
        def train(state: State) -> bool:
            with pytest.raises(ConfigError, match="split: the ranks of an elastic job change"):
                comm.split(0)
            return True

        return train(State())


def test_the_group_of_an_elastic_job_is_not_split() -> None:
    assert run_ranks(in_an_elastic_job, 2) == [True, True]


def within_ports() -> list[Any]:
    """All ranks may listen at a few ports only; what is open stays open."""
    with gradring.init() as comm, gradring.init() as again:
        first, second = comm.split(0), comm.split(0)
        assert again is comm and first is not None and second is not None
        with first, second:
            return [int(group.all_reduce(1)) for group in (first, second, comm)]


def test_groups_keep_to_the_ports_that_are_allowed() -> None:
    start = min(free_ports(1)[0], 60_000)
    env = {"GRADRING_PORT": f"{start}-{start + 40}"}
    assert run_ranks(within_ports, 3, env=env) == [[3, 3, 3]] * 3


def test_groups_take_any_port_where_their_rank_has_a_single_one_for_itself() -> None:
    env = {"GRADRING_PORT": str(free_ports(1)[0])}
    assert run_ranks(within_ports, 2, env=env) == [[2, 2, 2]] * 2


def test_groups_form_across_hosts() -> None:
    with simulated_hosts(2) as hosts:
        results = run_ranks(with_communicator, 4, places, [0, 0, 1, 1], [0, 1, 1, 0], hosts=hosts)
    assert results == [[0, 2, [0, 1]], [1, 2, [0, 1]], [1, 2, [3, 2]], [0, 2, [3, 2]]]


def stranger_at_the_door() -> Any:
    """Rank 0's group is asked by a process without the token, while it forms and afterwards."""
    with gradring.init() as comm:
        group = comm.split(0)
        assert group is not None
        with group:
            address = group._rendezvous
            with pytest.raises(AuthenticationError):
                gradring.Communicator(1, 2, address, token="wrong", timeout=5.0)
            return int(group.all_reduce(1))


def test_a_group_knows_the_token_of_the_one_that_it_was_made_from() -> None:
    assert run_ranks(stranger_at_the_door, 2) == [2, 2]


def different_in_a_group(directory: Path) -> Any:
    """Ranks 1 and 3 of four; and of them a group again, in the other order."""
    file = directory / os.environ["GRADRING_RANK"]
    file.touch()
    os.environ["GRADRING_FAILURE_FILE"] = str(file)
    said = []
    with gradring.init() as comm:
        group = comm.split(comm.rank % 2)
        assert group is not None
        again = group.split(7, key=-group.rank)
        assert again is not None
        for part in (again, group):
            with part, pytest.raises(MismatchError) as caught:
                part.all_reduce(np.ones(1 + comm.rank), name="x")
            assert caught.value.rank == 1 and f"rank 1 on {part.hosts[1]} " in str(caught.value)
            said.append((str(caught.value), json.loads(file.read_text())["rank"]))
        comm.barrier()
        with pytest.raises(MismatchError) as of_all:
            comm.all_reduce(np.ones(1 + comm.rank))
        assert "of the world" not in str(of_all.value)
        return said


def test_an_error_of_a_group_says_which_it_is_and_what_its_ranks_are_in_the_world(
    tmp_path: Path,
) -> None:
    for rank, ((nested, blamed), (text, also_blamed)) in enumerate(
        run_ranks(different_in_a_group, 4, tmp_path)
    ):
        first, last = rank % 2, rank % 2 + 2
        ranks = "whose ranks from 0 on are ranks"
        assert f" (in the group of color 7, {ranks} {last}, {first} of the world); " in nested
        assert f" (in the group of color {first}, {ranks} {first}, {last} of the world); " in text
        # What the launcher is told.
        assert (blamed, also_blamed) == (first, last)


@pytest.mark.parametrize(
    ("color", "key", "what"),
    [(1.5, 0, "color=1.5"), ("a", 0, "color='a'"), (True, 0, "color=True"), (0, None, "key=None")],
)
def test_colors_and_keys_are_whole_numbers(color: Any, key: Any, what: str) -> None:
    with gradring.init() as comm, pytest.raises(TypeError, match=f"split: {what} is no whole"):
        comm.split(color, key)
