"""Programs that the launcher starts, here and on other hosts, called in this process."""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gradring.launch import collect, exec_rank, guardian, input_server, remote_rank
from gradring.launch.hosts import Host, parse_hosts
from gradring.launch.ssh import Ssh
from gradring.records.paths import part_of, parts_of


@pytest.fixture
def signals() -> Iterator[None]:
    """Gives back what these programs change for themselves."""
    changed = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ]
    before = [(signum, signal.getsignal(signum)) for signum in changed]
    yield
    for signum, handler in before:
        signal.signal(signum, handler)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What a program asks of the kernel for itself."""
    found: list[tuple[int, ...]] = []
    kernel = SimpleNamespace(prctl=lambda *request: found.append(request))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: kernel)
    return found


INTERPRETER = "; its first line must be #! and the path of an interpreter that exists"


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0, "No such file or directory"),
        ("#!/no/such/interpreter\n", 0o755, f"No such file or directory{INTERPRETER}"),
        ("echo x\n", 0o755, f"Exec format error{INTERPRETER}"),
        ("#!/bin/sh\n", 0o644, "Permission denied"),
    ],
)
def test_a_command_that_cannot_start_is_named_with_what_is_wrong_with_it(
    text: str | None,
    mode: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    requests: list[tuple[int, ...]],
) -> None:
    program = tmp_path / "train"
    if text is not None:
        program.write_text(text)
        program.chmod(mode)
    monkeypatch.setattr(sys, "argv", ["exec_rank.py", str(os.getppid()), str(program), "--lr", "1"])
    with pytest.raises(SystemExit) as ended:
        exec_rank.main()
    assert ended.value.code == 127
    assert capsys.readouterr().err == f"cannot start '{program}': {said}\n"
    # It would end with its launcher, and by a pipe that nobody reads.
    assert requests == [(exec_rank.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)]
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL


def test_a_rank_whose_launcher_has_gone_before_it_begins_ends(
    monkeypatch: pytest.MonkeyPatch, requests: list[tuple[int, ...]]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    exec_rank.die_with(os.getppid())
    assert codes == []
    exec_rank.die_with(os.getppid() + 1)
    assert codes == [128 + signal.SIGKILL]
    assert len(requests) == 2


@pytest.mark.usefixtures("signals")
def test_a_guardian_kills_the_groups_that_are_left_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = []

    def kill(group: int, signum: int) -> None:
        killed.append((group, signum))
        if group == 12:
            raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", kill)
    monkeypatch.setattr(sys, "stdin", io.StringIO("+11\n+12\n-11\n+13\n"))
    guardian.main()
    assert sorted(killed) == [(12, signal.SIGKILL), (13, signal.SIGKILL)]
    # Ctrl-C in the launcher's terminal must not end it before that.
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes what comes through ssh, to its end."""
    reading, writing = os.pipe()
    monkeypatch.setattr(remote_rank, "STDIN", reading)
    monkeypatch.chdir(tmp_path)
    with open(reading, "rb"), open(writing, "wb") as pipe:

        def given(text: str) -> None:
            pipe.write(text.encode())
            pipe.close()

        yield given


def test_a_rank_on_another_host_whose_launcher_says_nothing_ends_as_by_a_hangup(order: Any) -> None:
    order("half of an order")
    assert remote_rank.main() == 128 + signal.SIGHUP


def test_a_directory_that_another_host_does_not_have_is_named_with_the_host(
    order: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    order(json.dumps({"directory": gone}) + "\n")
    assert remote_rank.main() == 127
    host = socket.gethostname()
    said = f"no directory {gone!r} on {host}: No such file or directory\n"
    assert capsys.readouterr().err == said


def test_a_host_without_a_temporary_directory_is_named(
    order: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    order(json.dumps({"directory": str(tmp_path)}) + "\n")
    assert remote_rank.main() == 127
    said = capsys.readouterr().err
    assert said.startswith(f"{socket.gethostname()}: the launcher needs a temporary directory")
    assert "set TMPDIR to a directory that can be written" in said


@dataclass(frozen=True)
class Answers(Ssh):
    """Hosts that answer so, or fail."""

    by_host: dict[str, Any] = field(default_factory=dict)

    def ask(self, host: Host, module: str, *arguments: str, limit_s: float) -> Any:
        assert (module, limit_s) == (collect.__name__, collect.LIMIT_S)
        answer = self.by_host[host.name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def packed(parts: dict[str, str]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(parts).encode())).decode()


def test_parts_of_a_timeline_on_another_host_are_brought_here_and_removed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = collect.new_job()
    there = collect.make_room(job)
    for group in (1, 2):
        part = part_of(there, 3, group)
        part.parent.mkdir(exist_ok=True)
        part.write_text(f"of group {group}")
    monkeypatch.setattr(sys, "argv", ["collect", job])
    collect.main()
    assert list(tmp_path.iterdir()) == []
    ssh = Answers(by_host={"a": json.loads(capsys.readouterr().out)})
    here = tmp_path / "timeline.json"
    assert collect.collect(parse_hosts("a"), ssh, job, here) == []
    assert [part_of(here, 3, group).read_text() for group in (1, 2)] == ["of group 1", "of group 2"]


def test_parts_that_cannot_be_had_cost_no_other_hosts_and_leave_their_directory_never(
    tmp_path: Path,
) -> None:
    failed = [subprocess.CalledProcessError(255, "ssh", "", said) for said in ("a\nno route\n", "")]
    answers = [
        packed({"rank-0.json": "whole"}),
        packed({"../../rank-1.json": "x"}),
        "no base64 of ours",
        *failed,
        subprocess.TimeoutExpired("ssh", 30.0),
    ]
    ssh = Answers(by_host=dict(zip("abcdef", answers, strict=True)))
    trace = tmp_path / "jobs" / "timeline.json"
    said = collect.collect(parse_hosts("a,b,c,d,e,f"), ssh, "", trace)
    assert [text.partition(" cannot be had: ")[0] for text in said] == [
        f"the timeline's parts on {host}" for host in "bcdef"
    ]
    whys = [text.partition(" cannot be had: ")[2] for text in said]
    assert whys[0] == "'../../rank-1.json' is no name of a part"
    assert whys[2] == "no route" and "exit status 255" in whys[3] and "30.0 seconds" in whys[4]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [parts_of(trace) / "rank-0.json"]


def test_a_name_that_no_run_has_names_no_directory() -> None:
    with pytest.raises(ValueError, match="'0123' names no run"):
        collect.trace_of("0123")


class Started:
    """A server of tf.data service."""

    def __init__(self, port: int) -> None:
        self._server = SimpleNamespace(bound_port=lambda: port)

    def join(self) -> None:
        """It has been killed."""


def serve(monkeypatch: pytest.MonkeyPatch, started: Any) -> int:
    monkeypatch.setattr(input_server, "_started", started)
    monkeypatch.setattr(sys, "argv", ["input_server", "127.0.0.1", "0"])
    monkeypatch.setattr(signal, "alarm", lambda _: 0)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    return input_server.main()


def test_the_service_of_one_host_takes_what_comes_over_loopback_only(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as own, socket.create_server(("", 0)) as other:
        port = own.getsockname()[1]
        assert serve(monkeypatch, lambda *_: Started(port)) == 1
        devices = [
            each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for each in (own, other)
        ]
    assert devices == [b"lo\0", b""]
    assert capfdbinary.readouterr().err.endswith(b' {"port": %d}\n' % port)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("No module named 'tf'"), "--input-workers needs TensorFlow: No module named"),
        (RuntimeError("no such port"), "tf.data service cannot start: no such port"),
        (None, "tf.data service cannot start: no socket listens at port 1\n"),
    ],
)
def test_a_service_that_cannot_start_says_why(
    error: Exception | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*_: object) -> Started:
        if error is not None:
            raise error
        return Started(1)

    assert serve(monkeypatch, started) == 1
    assert capsys.readouterr().err.startswith(f"{socket.gethostname()}: {said}")


@pytest.mark.parametrize(("host", "address"), [("node-a", "node-a"), ("fd00::7", "[fd00::7]")])
def test_a_worker_tells_the_dispatcher_where_ranks_reach_it(
    host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("DispatchServer", "DispatcherConfig", "WorkerServer", "WorkerConfig")
    module = ModuleType("tensorflow.data.experimental")
    given = {name: lambda *what, name=name, **how: (name, *what, how) for name in names}
    module.service = SimpleNamespace(**given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    grpc = {"port": 0, "protocol": "grpc"}
    dispatcher = input_server._started(host, 0)
    assert dispatcher == ("DispatchServer", ("DispatcherConfig", grpc), {})
    kind, (_, config), _ = input_server._started(host, 0, "node-b:4712")
    assert kind == "WorkerServer"
    where = {"dispatcher_address": "node-b:4712", "worker_address": f"{address}:%port%"}
    assert config == {**grpc, **where, "heartbeat_interval_ms": input_server.HEARTBEAT_MS}
