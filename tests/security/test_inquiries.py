"""A job that runs answers those who know its secrets, and nobody else."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradring import errors
from gradring.config.values import TlsFiles
from gradring.machine.ports import free_ports
from gradring.tools.doctor.job import ask_job
from support.certificates import DAY, NOW, Authority
from support.commands import command_line, completed, succeeded
from support.waiting import wait_until

LOCAL = "127.0.0.1"
TOKEN = "the-job's-own-token"
DEADLINE_S = 60.0

PROGRAM = """\
import time
import numpy
import gradring
with gradring.init() as comm:
    comm.all_reduce(numpy.ones(4), name="weights")
    time.sleep(300)
"""


@contextlib.contextmanager
def job(*variables: dict[str, str], token: str | None = TOKEN) -> Iterator[str]:
    """A job of as many ranks, with these variables; yields its rendezvous once it runs."""
    address = f"{LOCAL}:{free_ports(1)[0]}"
    common = {"GRADRING_RENDEZVOUS": address, "GRADRING_WORLD_SIZE": str(len(variables))}
    if token is not None:
        common["GRADRING_TOKEN"] = token
    with contextlib.ExitStack() as stack:
        for rank, own in enumerate(variables):
            environ = {**os.environ, **common, "GRADRING_RANK": str(rank), **own}
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ)
            )
            stack.callback(process.kill)
        files = TlsFiles(*own.values()) if own else None
        wait_until(lambda: is_running(address, token, files), "the job runs")
        yield address


def is_running(address: str, token: str | None, files: TlsFiles | None) -> bool:
    try:
        state = ask_job(address, token.encode() if token else None, files)
    except errors.RendezvousError:
        return False
    # The core measures the links before, by collectives of its own.
    ended = ["weights" in str(rank.ended) for rank in state.states.values()]
    return state.missing is None and all(ended) and not state.silent


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_who_does_not_know_the_token_or_asks_inside_tls_is_told_nothing(
    authority: Authority,
) -> None:
    with job({}, {}) as address:
        assert ask_job(address, TOKEN.encode()).world_size == 2
        for guess in (None, b"", b"guess"):
            with pytest.raises(errors.AuthenticationError, match="token"):
                ask_job(address, guess)
        asker = authority.certify("doctor", LOCAL).files()
        with pytest.raises(errors.ConfigError, match="answers without TLS"):
            ask_job(address, TOKEN.encode(), asker)


def test_without_a_token_everybody_is_told() -> None:
    with job({}, {}, token=None) as address:
        assert ask_job(address, None).states[1].ended is not None


def frames(received: bytes) -> list[bytes]:
    """The messages in what a listener said, each behind its length."""
    messages = []
    while received:
        (length,) = struct.unpack_from("<I", received)
        messages.append(received[4 : 4 + length])
        received = received[4 + length :]
    return messages


def test_a_stranger_gets_no_facts_out_of_a_listener() -> None:
    with job({}, {}) as address:
        host, port = address.split(":")
        answers = []
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 30), b"\0" * 4000):
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
                with contextlib.suppress(OSError):  # it may have been sent away by now
                    stranger.sendall(greeting)
                    stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError), stranger.makefile("rb") as answer:
                    answers.append(answer.read())
        assert all(len(message) < 200 for answer in answers for message in frames(answer))
        said = b"".join(answers)
        for fact in (socket.gethostname().encode(), b"weights", b"all_reduce", TOKEN.encode()):
            assert fact not in said


def test_a_job_inside_tls_is_asked_inside_tls_and_refuses_wrong_certificates(
    authority: Authority, tmp_path: Path
) -> None:
    own = authority.certify("all", LOCAL)
    with job(own.variables(), own.variables()) as address:
        # A process that asks needs a certificate of the authority, for any name.
        asker = authority.certify("doctor", "doctors.desk").files()
        state = ask_job(address, TOKEN.encode(), asker)
        assert sorted(state.states) == [0, 1]
        assert "weights" in str(state.states[1].ended)
        with pytest.raises(errors.AuthenticationError, match="token"):
            ask_job(address, b"guess", asker)
        impostor = Authority(tmp_path, "impostor")
        for wrong, reason in [
            (impostor.certify("trusts-itself", LOCAL), "does not lead to an authority"),
            (impostor.certify("odd", LOCAL, trusting=authority.path), "UnknownCA"),
            (authority.certify("old", LOCAL, start=NOW - 5 * DAY), "CertificateExpired"),
        ]:
            with pytest.raises(errors.AuthenticationError, match=reason):
                ask_job(address, TOKEN.encode(), wrong.files())
        with pytest.raises(errors.ConfigError, match="takes TLS only"):
            ask_job(address, TOKEN.encode())
        # None of this has harmed it.
        assert ask_job(address, TOKEN.encode(), own.files()).verdict()[0]


def test_the_doctor_uses_the_certificates_that_it_is_given_or_finds(
    authority: Authority, tmp_path: Path
) -> None:
    own = authority.certify("all", LOCAL).variables()
    wrong = Authority(tmp_path, "impostor").certify("odd", LOCAL, trusting=authority.path)
    with job(own, own) as address:
        for given in ({"GRADRING_TOKEN": TOKEN, **own}, {}):
            report = succeeded("doctor", address, timeout=DEADLINE_S, env=given)
            assert f"job at {address}: 2 ranks" in report.stdout
        given = {"GRADRING_TOKEN": TOKEN, **wrong.variables()}
        report = completed(command_line("doctor", address), timeout=DEADLINE_S, env=given)
        assert report.returncode == 1
        assert "does not accept this rank's certificate" in report.stdout
