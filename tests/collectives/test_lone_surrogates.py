"""Lone surrogates, of which Python makes the bytes of a file's name that are no text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.updates import ParameterServer

#: Of a byte of a file's name, and one that no file's name gives.
SURROGATES = ["\udcff", "\ud800"]
X = np.arange(4, dtype=np.float32)

CALLS: dict[str, Callable[[Any, str], Any]] = {
    "all_reduce": lambda comm, name: comm.all_reduce(X, name=name),
    "reduce": lambda comm, name: comm.reduce(X, name=name),
    "reduce_scatter": lambda comm, name: comm.reduce_scatter(X, name=name),
    "all_gather": lambda comm, name: comm.all_gather(X, name=name),
    "gather": lambda comm, name: comm.gather(X, name=name),
    "scatter": lambda comm, name: comm.scatter(X[None], name=name),
    "broadcast": lambda comm, name: comm.broadcast(X, name=name),
    "all_to_all": lambda comm, name: comm.all_to_all(X[None], name=name),
    "all_to_all with splits": lambda comm, name: comm.all_to_all(X, [4], name=name),
    "all_reduce_async": lambda comm, name: comm.all_reduce_async(X.copy(), name=name).wait(),
    "all_gather_async": lambda comm, name: comm.all_gather_async(X, name=name).wait(),
    "broadcast_object": lambda comm, name: comm.broadcast_object(name, name=name),
    "all_gather_object": lambda comm, name: comm.all_gather_object([name], name=name),
    "split": lambda comm, name: comm.split(0, name=name).all_reduce(X),
    "abort": lambda comm, name: comm.split(0).abort(name),
}


@pytest.mark.parametrize("surrogate", SURROGATES, ids=ascii)
@pytest.mark.parametrize("call", CALLS)
def test_names_and_reasons_may_have_some(call: str, surrogate: str) -> None:
    with gradring.init() as comm:
        CALLS[call](comm, f"load {surrogate}.npz")


@pytest.mark.parametrize("surrogate", SURROGATES, ids=ascii)
@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter"])
def test_a_reduce_op_that_has_some_is_refused_by_name(call: str, surrogate: str) -> None:
    with gradring.init() as comm, pytest.raises(ValueError, match=r"^op=.* is none of sum"):
        getattr(comm, call)(X, surrogate)


def test_a_file_whose_name_is_no_text_takes_a_timeline(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json"))
    with gradring.init() as comm:
        comm.trace_start(path)
        comm.all_reduce(X)
        assert comm.trace_stop() == path
    assert path.exists()


@pytest.mark.parametrize("name", ["log_dir", "flight_dir"])
def test_a_directory_may_have_a_name_that_is_no_text(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "\udcff"
    assert getattr(Settings.from_environ({}, **{name: directory}), name) == directory
    with pytest.raises(ConfigError, match=f"^{name}=.* has characters that no path can have"):
        Settings.from_environ({}, **{name: tmp_path / "\ud800"})


@pytest.mark.parametrize("wrong", ["ca", "cert", "key"])
def test_certificates_in_files_that_no_path_leads_to_are_named(wrong: str) -> None:
    files = gradring.TlsFiles(**{"ca": "a", "cert": "b", "key": "c", wrong: "\ud800"})
    with pytest.raises(ConfigError, match=f"^tls.{wrong}=.* has characters that no path can have"):
        Settings.from_environ({}, tls=files)


def test_snapshots_go_where_a_path_leads() -> None:
    assert ParameterServer(snapshots="\udcff").snapshots == "\udcff"
    of_bytes: Any = b"\xff"
    assert ParameterServer(snapshots=of_bytes).snapshots == "\udcff"
    for wrong, says in [
        ("\ud800", "has characters that no path can have"),
        ("a" * 300, "too long"),
    ]:
        with pytest.raises(ConfigError, match=f"^ParameterServer: snapshots=.* {says}"):
            ParameterServer(snapshots=wrong)
