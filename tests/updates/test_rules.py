"""The rules as values: what is refused, how they look, and that ranks agree on one."""

import sys
from typing import Any

import numpy as np
import pytest

import gradring
from gradring import updates
from gradring.errors import ConfigError, MismatchError
from gradring.testing import run_ranks
from gradring.updates.rules import check_servers


def test_rules_show_what_they_are_and_are_values() -> None:
    assert repr(updates.AllReduce()) == "AllReduce(compression=None, sync_every=1)"
    assert repr(updates.Primary(4)) == "Primary(sync_every=4)"
    top = updates.AllReduce(compression=updates.TopK(np.float32(0.5)))
    assert repr(top) == "AllReduce(compression=TopK(fraction=0.5), sync_every=1)"
    assert updates.PowerSGD(np.int64(4)) == updates.PowerSGD(rank=4)
    diloco = updates.LocalSGD(every=16, outer=updates.Nesterov(0.7, 0.9))
    nesterov = "Nesterov(learning_rate=0.7, momentum=0.9)"
    assert repr(diloco) == f"LocalSGD(every=16, outer={nesterov})"
    assert diloco == updates.LocalSGD(np.int64(16), updates.Nesterov())
    placed = updates.ParameterServer(np.int64(2), placement={"b": np.int64(1), "a": 0})
    assert repr(placed) == (
        "ParameterServer(staleness=2, aggregate=1, overflow='wait', late='weight', backup=0, "
        "placement={'a': 0, 'b': 1}, snapshots=None, snapshot_every=100, "
        "replicas=0, worker_timeout=60.0)"
    )
    assert len({updates.ParameterServer(), updates.ParameterServer(0)}) == 1
    assert repr(updates.LocalSGD(np.int64(8))) == repr(updates.LocalSGD(8))
    with pytest.raises(AttributeError):
        diloco.every = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: updates.AllReduce(compression="int8"), "AllReduce: compression='int8'"),  # type: ignore[arg-type]
        (lambda: updates.AllReduce(updates.Int8), "AllReduce: compression=<class "),  # type: ignore[arg-type]
        (lambda: updates.Bits16("float8"), "Bits16: dtype='float8'"),  # type: ignore[arg-type]
        (lambda: updates.TopK(0), "TopK: fraction=0"),
        (lambda: updates.TopK(float("nan")), "TopK: fraction=nan"),
        (lambda: updates.PowerSGD(True), "PowerSGD: rank=True"),
        (lambda: updates.AllReduce(sync_every=0), "AllReduce: sync_every=0"),
        (lambda: updates.Primary(sync_every=1.5), "Primary: sync_every=1.5"),  # type: ignore[arg-type]
        (lambda: updates.LocalSGD(every=True), "LocalSGD: every=True"),
        (lambda: updates.LocalSGD(outer="Nesterov"), "LocalSGD: outer='Nesterov'"),  # type: ignore[arg-type]
        (lambda: updates.ParameterServer(-1), "ParameterServer: staleness=-1"),
        (lambda: updates.ParameterServer(None, 0), "ParameterServer: aggregate=0"),
        (lambda: updates.ParameterServer(aggregate=2), "ParameterServer: aggregate=2 needs anot"),
        (lambda: updates.ParameterServer(1, backup=1), "ParameterServer: backup=1 needs stal"),
        (lambda: updates.ParameterServer(overflow="x"), "ParameterServer: overflow='x' is not"),  # type: ignore[arg-type]
        (lambda: updates.ParameterServer(late=1), "ParameterServer: late=1 is not one of w"),  # type: ignore[arg-type]
        (lambda: updates.ParameterServer(placement={"a": -1}), "ParameterServer: placement={'a'"),
        (lambda: updates.ParameterServer(placement=["a"]), "ParameterServer: placement=['a'] does"),  # type: ignore[arg-type]
        (lambda: updates.ParameterServer(snapshot_every=0), "ParameterServer: snapshot_every=0"),
        (lambda: updates.ParameterServer(replicas=-1), "ParameterServer: replicas=-1 is not"),
        (
            lambda: updates.ParameterServer(None, replicas=1, late="compensate"),
            "ParameterServer: replicas=1 needs another late",
        ),
        (
            lambda: check_servers(updates.ParameterServer(replicas=2), 2),
            "ParameterServer: replicas=2 needs at least 3 parameter servers, and there are 2",
        ),
        (lambda: updates.ParameterServer(worker_timeout=-1), "ParameterServer: worker_timeout=-1"),
        (lambda: updates.Nesterov(0.0), "Nesterov: learning_rate=0.0"),
        (lambda: updates.Nesterov(float("inf")), "Nesterov: learning_rate=inf"),
        (lambda: updates.Nesterov(momentum=1), "Nesterov: momentum=1"),
        (lambda: updates.Nesterov(momentum="a"), "Nesterov: momentum='a'"),  # type: ignore[arg-type]
    ],
)
def test_a_rule_that_cannot_be_is_refused_when_it_is_made(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=r"correct it|leave it out") as caught:
        make()
    assert str(caught.value).startswith(named)


def disagreeing() -> list[str]:
    said = []
    with gradring.init() as comm:
        for rule in ("AllReduce", updates.AllReduce):
            with pytest.raises(ConfigError) as caught:
                updates.agree(rule, comm)
            said.append(str(caught.value))
        assert updates.agree(updates.Primary(), comm) == updates.Primary()
        with pytest.raises(MismatchError) as caught_mismatch:
            updates.agree(updates.LocalSGD(16 if comm.rank < 2 else 8), comm)
        assert caught_mismatch.value.rank == 2
        # The group stays usable.
        updates.agree(updates.AllReduce(), comm)
        assert "tensorflow" not in sys.modules
        return [*said, str(caught_mismatch.value)]


@pytest.mark.usefixtures("fresh_interpreters")
def test_ranks_with_different_rules_are_named_with_both() -> None:
    for name, kind, mismatch in run_ranks(disagreeing, 3):
        assert name.startswith("update='AllReduce' is no update rule")
        assert kind.startswith("update=<class ")
        assert mismatch.startswith("rank 2 on ")
        assert "LocalSGD(every=8, outer=None)" in mismatch
        assert "LocalSGD(every=16, outer=None)" in mismatch
