"""Pickles, which can run code where they are opened: only where no stranger can be a rank."""

from __future__ import annotations

import os
import re
import warnings
from fractions import Fraction
from typing import Any

import pytest

import gradring
from gradring.errors import ConfigError
from gradring.testing import run_ranks, simulated_hosts
from support.documents import ROOT
from support.pairs import on_threads


def exchange(token: str | None, wide_rank: int | None = None) -> list[Any]:
    """What each call gives; ``wide_rank`` listens at every address of its host."""
    del os.environ["GRADRING_TOKEN"]
    warnings.simplefilter("ignore", UserWarning)  # about the token that is not there
    interface = "0.0.0.0" if wide_rank == int(os.environ["GRADRING_RANK"]) else None
    with gradring.init(token=token, interface=interface) as comm:
        said = []
        for call in (comm.broadcast_object, comm.all_gather_object):
            try:
                said.append(call(Fraction(1, 3), pickle=True))
            except ConfigError as error:
                said.append((error.rank, error.host == comm.host, str(error)))
        return [*said, comm.all_gather_object("JSON")]


@pytest.mark.parametrize("count", [1, 2])
def test_without_a_token_nothing_is_unpickled_where_others_reach_the_ports(count: int) -> None:
    """Also on one host: a stranger's rank says that it is there."""
    with simulated_hosts(count) as hosts:
        found = run_ranks(exchange, 2, None, hosts=[hosts[0], hosts[-1]])
    for rank, (broadcast, gathered, plain) in enumerate(found):
        for said, name in ((broadcast, "broadcast_object"), (gathered, "all_gather_object")):
            assert said[:2] == (rank, True)
            assert (
                said[2].startswith(f"{name}: a pickle can run code")
                and "set GRADRING_TOKEN" in said[2]
            )
        assert plain == ["JSON", "JSON"], "the group goes on"


@pytest.mark.parametrize("wide_rank", [0, 1])
def test_a_rank_that_listens_beyond_loopback_is_named_though_its_address_is_loopback(
    wide_rank: int,
) -> None:
    """All ranks refuse: the one that a stranger can reach, and those that it could send to."""
    found = run_ranks(exchange, 2, None, wide_rank)
    for rank, (broadcast, gathered, plain) in enumerate(found):
        for refused in (broadcast, gathered):
            assert refused[:2] == (rank, True)
            assert f"reaches the port of rank {wide_rank} on " in refused[2]
        assert plain == ["JSON", "JSON"], "the group goes on"


def exchange_in_parts() -> list[str]:
    """A group of `split`, and one of Horovod's names, have the sockets of their ranks."""
    del os.environ["GRADRING_TOKEN"]
    warnings.simplefilter("ignore", UserWarning)
    with gradring.init(interface="0.0.0.0") as comm:
        said = []
        with comm.split(0) as part, pytest.raises(ConfigError) as in_part:
            part.broadcast_object(Fraction(1, 3), pickle=True)
        said.append(str(in_part.value))
        import gradring.horovod.tensorflow as hvd

        hvd.init()
        with pytest.raises(ConfigError) as of_horovod:
            hvd.broadcast_object(Fraction(1, 3))
        said.append(str(of_horovod.value))
        return said


def test_groups_of_split_and_horovods_functions_refuse_alike() -> None:
    for said in run_ranks(exchange_in_parts, 2):
        assert len(said) == 2
        assert all("set GRADRING_TOKEN" in text for text in said)


def forms_a_group() -> tuple[str, list[str]]:
    del os.environ["GRADRING_TOKEN"]
    job = os.environ.pop("GRADRING_JOB_ID", None)
    with pytest.raises(ConfigError) as refused:
        gradring.init(interface="0.0.0.0")
    os.environ["GRADRING_JOB_ID"] = job or "a-job"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gradring.init(interface="0.0.0.0").close()
    return str(refused.value), [str(warning.message) for warning in warned]


def test_a_wide_interface_needs_a_job_id_and_warns_whatever_the_rendezvous_says() -> None:
    for refused, warned in run_ranks(forms_a_group, 2):
        assert "neither a token nor a job id" in refused
        assert len(warned) == 1 and "anybody who reaches its ports" in warned[0]


def test_with_a_token_pickles_travel_between_hosts() -> None:
    with simulated_hosts(2) as hosts:
        found = run_ranks(exchange, 2, "secret", hosts=hosts)
    assert found == [[Fraction(1, 3), [Fraction(1, 3)] * 2, ["JSON", "JSON"]]] * 2


def test_on_the_loopback_of_one_machine_nobody_needs_a_token() -> None:
    def sent(comm: gradring.Communicator) -> Any:
        return comm.all_gather_object(Fraction(comm.rank), pickle=True)

    assert on_threads(2, sent) == [[Fraction(0), Fraction(1)]] * 2


#: Modules that open pickles: of ranks that have proved themselves, and of own child processes.
UNPICKLING = {
    "group/objects.py",
    "testing/function.py",
    "testing/harness.py",
    "testing/worker.py",
    "tools/bench/systems/mpi.py",
    "tools/bench/systems/mpi_rank.py",
}


def test_no_other_module_opens_pickles() -> None:
    """SECURITY.md says so, and a page compares that with Horovod's vulnerabilities."""
    sources = ROOT / "python" / "gradring"
    opens = re.compile(
        r"^\s*(?:import|from) (?:cloudpickle|dill|joblib|marshal|multiprocessing|pickle|shelve)\b"
        r"|\ballow_pickle\b",
        re.MULTILINE,
    )
    found = {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*.py")
        if opens.search(path.read_text())
    }
    assert found == UNPICKLING
    for page in ("SECURITY.md", "docs/coming-from-horovod.md"):
        assert {"CVE-2024-10190", "CVE-2026-31234"} <= set(
            re.findall(r"CVE-[0-9]+-[0-9]+", (ROOT / page).read_text())
        )
