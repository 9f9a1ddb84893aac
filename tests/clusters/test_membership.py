"""A process that joins its group again gets the one it has, with the settings that this one has."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gradring
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks


def total(comm: gradring.Communicator) -> float:
    return comm.all_reduce(1.0)


def refused(**settings: Any) -> str:
    with pytest.raises(gradring.errors.ConfigError) as raised:
        gradring.init(**settings)
    return str(raised.value)


def join_again(elsewhere: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = gradring.init(transport="tcp", wire_dtype="bfloat16")
    with gradring.init() as second:
        found["same"] = second is first
    second = gradring.init(streams=1, wire_dtype="bfloat16", reproducible=False, timeout=7.0)
    second.close()
    found["open"] = total(first)
    found["argument"] = refused(wire_dtype="float16")
    found["default"] = refused(algorithm="ring")
    found["token"] = refused(token="guessed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADRING_REPRODUCIBLE", "1")
        found["variable"] = refused()
        found["argument beats variable"] = gradring.init(reproducible=False) is first
    first.close()
    found["still open"] = total(first)
    other = gradring.init(rendezvous=elsewhere)
    found["elsewhere"] = other is not first and total(other)
    other.close()
    first.close()
    first.close()
    again = gradring.init(checksum=True)
    found["new"] = again is not first and total(again)
    if again.rank == 0:
        again.abort("it is of no use")
    with pytest.raises(gradring.errors.AbortedError):
        total(again)
    after = gradring.init()
    found["after failure"] = after is not again and total(after)
    found["closed"] = again in gradring.group.communicator.open_groups
    return found


def join_at_once(threads: int) -> float:
    together = threading.Barrier(threads)

    def join(_: int) -> gradring.Communicator:
        together.wait()
        return gradring.init()

    with ThreadPoolExecutor(threads) as pool:
        comm, *others = pool.map(join, range(threads))
    assert all(other is comm for other in others)
    for _ in others:
        comm.close()
    with comm:
        return total(comm)


def test_threads_that_join_at_once_get_one_group() -> None:
    assert run_ranks(join_at_once, 2, 8) == [2.0, 2.0]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(join_again, 2, f"127.0.0.1:{free_ports(1)[0]}")


def test_the_group_is_open_until_all_who_joined_have_closed_it(ranks: Any) -> None:
    for found in ranks:
        assert found["same"] and found["argument beats variable"]
        assert found["open"] == found["still open"] == 2.0


def test_settings_that_the_group_does_not_have_are_refused_by_name(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        for wanted in ("argument", "default", "variable", "token"):
            assert f"rank {rank} of 2 is in the group at 127.0.0.1:" in found[wanted]
        assert "wire_dtype='float16', not 'bfloat16'; give all the same" in found["argument"]
        assert "algorithm='ring', not 'auto'" in found["default"]
        assert "reproducible=True, not False" in found["variable"]
        assert "another token" in found["token"] and "guessed" not in found["token"]


def test_another_rendezvous_makes_another_group(ranks: Any) -> None:
    assert [found["elsewhere"] for found in ranks] == [2.0, 2.0]


def test_a_closed_or_failed_group_is_followed_by_a_new_one(ranks: Any) -> None:
    for found in ranks:
        assert found["new"] == found["after failure"] == 2.0
        assert not found["closed"]
