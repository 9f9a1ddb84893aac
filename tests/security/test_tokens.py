"""The job's token: who does not know it stays outside, and nobody gets to see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradring
from gradring import errors
from gradring.config.values import Settings
from gradring.testing import run_ranks
from support.waiting import meet, wait_until

FORMING_S = 5.0


def join_with(tokens: list[str | None], place: Path) -> None:
    token = tokens[int(os.environ["GRADRING_RANK"])]
    os.environ.pop("GRADRING_TOKEN")
    if token is not None:
        os.environ["GRADRING_TOKEN"] = token
    meet(place, 2)
    gradring.init(timeout=FORMING_S)


@pytest.mark.parametrize(
    "tokens",
    [
        ["right", "wrong"],
        pytest.param(["right", None], marks=pytest.mark.slow),
        pytest.param([None, "wrong"], marks=pytest.mark.slow),
    ],
)
def test_a_wrong_or_missing_token_is_told_to_both_sides(
    tokens: list[str | None], tmp_path: Path
) -> None:
    host, initiator = run_ranks(join_with, 2, tokens, tmp_path, check=False, timeout=90)
    assert isinstance(initiator.exception, errors.AuthenticationError), initiator
    assert isinstance(initiator.exception, PermissionError)
    assert initiator.exception.rank == 0
    assert "token" in str(initiator.exception)
    assert isinstance(host.exception, errors.RendezvousError), host
    assert "turned away: 127.0.0.1: rank 1 and rank 0 have different tokens" in str(host.exception)
    for outcome in (host, initiator):
        for token in filter(None, tokens):
            assert token not in outcome.output + outcome.traceback + str(outcome.exception)


def join_unauthenticated() -> None:
    os.environ.pop("GRADRING_TOKEN")
    gradring.init(timeout=FORMING_S)


def test_a_required_token_that_is_missing_ends_the_start_on_all_ranks() -> None:
    outcomes = run_ranks(
        join_unauthenticated, 2, env={"GRADRING_REQUIRE_AUTH": "1"}, check=False, timeout=60
    )
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.ConfigError), outcome
        assert f"rank {outcome.rank} has no token" in str(outcome.exception)


PROGRAM = """\
import os, time
import numpy
import gradring

with gradring.init() as comm:
    comm.all_reduce(numpy.ones(3))
    open(f"{os.environ['NOTES']}/{comm.rank}", "w").write(os.environ["GRADRING_TOKEN"])
    while not os.path.exists(f"{os.environ['NOTES']}/seen"):
        time.sleep(0.05)
    print(comm, comm.stats())
    if comm.rank == 1:
        raise RuntimeError("to have a traceback")
    comm.barrier()
"""


def every_command_line() -> bytes:
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes())
        except OSError:
            continue
    return b"\n".join(lines)


def test_the_launchers_token_is_on_no_command_line_and_in_no_output(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "gradring", "run", "-np", "2", "--log-dir", str(logs)]
    job = subprocess.Popen(
        [*command, sys.executable, str(tmp_path / "train.py")],
        env={**os.environ, "NOTES": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        notes = [tmp_path / str(rank) for rank in range(2)]
        wait_until(
            lambda: all(note.exists() and note.read_text() for note in notes), "the ranks have met"
        )
        command_lines = every_command_line()
        (tmp_path / "seen").touch()
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    token = notes[0].read_text()
    assert len(token) == 64 and token == notes[1].read_text()
    assert b"train.py" in command_lines and token.encode() not in command_lines
    files = [path for path in logs.rglob("*") if path.is_file()]
    written = output + "".join(path.read_text() for path in files)
    assert "to have a traceback" in written and token not in written


@pytest.mark.parametrize(
    ("mode", "is_private"), [(0o600, True), (0o640, True), (0o604, False), (0o622, False)]
)
def test_a_token_file_must_be_private(tmp_path: Path, mode: int, is_private: bool) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"secret")
    path.chmod(mode)
    environ = {"GRADRING_TOKEN_FILE": str(path)}
    if is_private:
        assert Settings.from_environ(environ).token == b"secret"
        return
    with pytest.raises(errors.ConfigError, match=f"mode {mode:o}.*type: chmod 600 {path}"):
        Settings.from_environ(environ)
