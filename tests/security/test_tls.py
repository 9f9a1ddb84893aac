"""TLS between ranks: what travels is hidden, and a certificate that is not right is named."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from faults.test_faults import assert_lost, reduce_until_killed, survivors
from gradring import errors
from gradring.config.values import Settings, TlsFiles, Transport
from gradring.machine.ports import free_ports
from gradring.testing import Outcome, run_ranks
from gradring.tools.bench.options import Options
from gradring.tools.cli import main
from gradring.tools.doctor.job import ask_job
from security.recorder import Recorder
from support.certificates import DAY, NOW, Authority, Certificate
from support.waiting import meet, wait_until

LOCAL = "127.0.0.1"
# Wide: rank 0 waits so long for the others before it says why they did not come.
FORMING_S = 5.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def use(certificate: Certificate | None) -> None:
    """Makes this process, and the ranks that it starts, use a certificate."""
    if certificate is not None:
        os.environ.update(certificate.variables())


def sums(
    transport: Transport, streams: int, sizes: list[int]
) -> tuple[str, list[float], list[float]]:
    with gradring.init(transport=transport, streams=streams) as comm:
        rank, ranks = comm.rank, comm.world_size
        found, works = [], []
        for size in sizes:
            x = np.arange(size, dtype=np.float32) + rank
            comm.all_reduce(x)
            assert (x == np.arange(size) * ranks + sum(range(ranks))).all()
            works.append(comm.all_reduce_async(np.full(size, rank + 1.0), name=f"w{size}"))
        found = [float(work.wait().sum()) for work in works]
        rows = comm.all_gather(np.full(3, rank))
        comm.barrier()
        return comm.stats()["transport"], found, rows.tolist()


#: Fewer ranks and streams than others have.
SLOW_WORLDS = [(2, "tcp", 1), (3, "tcp", 1), (2, "tcp", 4)]


@pytest.mark.parametrize(
    ("world_size", "transport", "streams"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_WORLDS),
        *((3, "tcp", 16), (4, "auto", 2)),
    ],
)
def test_collectives_work_inside_tls(
    authority: Authority, world_size: int, transport: str, streams: int
) -> None:
    certificate = authority.certify("all", LOCAL)
    sizes = [0, 1, 1000, 100_003, 3_000_001]
    results = run_ranks(sums, world_size, transport, streams, sizes, env=certificate.variables())
    total = sum(range(1, world_size + 1))
    rows = [float(rank) for rank in range(world_size) for _ in range(3)]
    name = "tcp" if transport == "tcp" else "shm"
    assert results == [(name, [float(size * total) for size in sizes], rows)] * world_size


SECRET = b"nobody may read!"


def send_a_secret(comm: gradring.Communicator) -> None:
    x = np.frombuffer(SECRET * 1000, np.uint8).copy()
    comm.broadcast(x, root=1)
    assert x.tobytes() == SECRET * 1000


def reduce(comm: gradring.Communicator) -> None:
    for _ in range(3):
        x = comm.all_reduce(np.ones(1 << 20, np.float32))
        assert (x == comm.world_size).all(), "a wrong value was returned as success"


def through(recorder: str, direct: str, act: Callable[[gradring.Communicator], None]) -> None:
    """Rank 1 reaches rank 0 through the recorder, for data too."""
    os.environ["GRADRING_RENDEZVOUS"] = direct if os.environ["GRADRING_RANK"] == "0" else recorder
    with gradring.init(transport="tcp") as comm:
        act(comm)


@pytest.mark.parametrize("hidden", [False, True])
def test_contents_travel_in_clear_without_tls_and_hidden_with_it(
    authority: Authority, hidden: bool
) -> None:
    variables = authority.certify("all", LOCAL).variables() if hidden else {}
    with Recorder() as recorder:
        direct = f"{LOCAL}:{recorder.target[1]}"
        run_ranks(through, 2, recorder.address, direct, send_a_secret, env=variables)
        assert len(recorder.seen()) > len(SECRET) * 1000
        assert (SECRET in recorder.seen()) is not hidden


def test_a_turned_bit_inside_tls_is_an_error_that_names_the_link(authority: Authority) -> None:
    variables = authority.certify("all", LOCAL).variables()
    with Recorder(turn_after=3 << 20) as recorder:
        direct = f"{LOCAL}:{recorder.target[1]}"
        arguments = (recorder.address, direct, reduce)
        outcomes = run_ranks(through, 2, *arguments, env=variables, check=False, timeout=90)
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.ProtocolError), outcome.details()
        assert outcome.exception.rank == 1
        assert "the connection from rank 1 on " in str(outcome.exception)


def join_with(certificates: list[Certificate | None], place: Path) -> None:
    use(certificates[int(os.environ["GRADRING_RANK"])])
    meet(place, len(certificates))
    with gradring.init(transport="tcp", timeout=FORMING_S) as comm:
        comm.barrier()


def failures(certificates: list[Certificate | None], directory: Path) -> list[errors.GradringError]:
    """What ranks with these certificates raise."""
    outcomes: list[Outcome] = run_ranks(
        join_with, len(certificates), certificates, directory / "met", check=False, timeout=90
    )
    raised = []
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.GradringError), outcome
        raised.append(outcome.exception)
    return raised


def other_authority(authority: Authority, directory: Path) -> Certificate:
    return Authority(directory, "impostor").certify("odd", LOCAL, trusting=authority.path)


def expired(authority: Authority, directory: Path) -> Certificate:
    return authority.certify("odd", LOCAL, start=NOW - 5 * DAY)


def not_valid_yet(authority: Authority, directory: Path) -> Certificate:
    return authority.certify("odd", LOCAL, start=NOW + 5 * DAY)


def other_name(authority: Authority, directory: Path) -> Certificate:
    return authority.certify("odd", "another.host", "10.9.8.7")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        pytest.param(other_authority, "does not lead to an authority", marks=pytest.mark.slow),
        pytest.param(expired, "expired", marks=pytest.mark.slow),
        pytest.param(not_valid_yet, "not valid yet", marks=pytest.mark.slow),
        (other_name, "not valid for name"),
    ],
)
def test_a_wrong_certificate_of_rank_0_is_named_by_who_calls_it(
    authority: Authority, tmp_path: Path, wrong: Callable[..., Certificate], reason: str
) -> None:
    certificates: list[Certificate | None] = [authority.certify("right", LOCAL)] * 2
    certificates[0] = wrong(authority, tmp_path)
    host, initiator = failures(certificates, tmp_path)
    assert isinstance(initiator, errors.AuthenticationError)
    assert initiator.rank == 0 and initiator.host
    assert reason in str(initiator)
    assert "turned away" in str(host) and "does not accept this rank's certificate" in str(host)


@pytest.mark.slow  # the test below has such a caller
@pytest.mark.parametrize(
    ("wrong", "reason", "alert"),
    [
        (other_authority, "does not lead to an authority", "UnknownCA"),
        (expired, "expired", "CertificateExpired"),
    ],
)
def test_a_wrong_certificate_of_a_caller_is_named_on_both_sides(
    authority: Authority,
    tmp_path: Path,
    wrong: Callable[..., Certificate],
    reason: str,
    alert: str,
) -> None:
    right = authority.certify("right", LOCAL)
    host, initiator = failures([right, wrong(authority, tmp_path)], tmp_path)
    assert isinstance(initiator, errors.AuthenticationError)
    assert initiator.rank == 0 and alert in str(initiator)
    assert "did not join" in str(host) and reason in str(host)


def test_a_rank_whose_certificate_is_for_another_address_is_named_by_who_calls_it(
    authority: Authority, tmp_path: Path
) -> None:
    right = authority.certify("right", LOCAL)
    host, _ = failures([right, other_name(authority, tmp_path)], tmp_path)
    assert isinstance(host, errors.AuthenticationError)
    assert host.rank == 1 and "not valid for name" in str(host)


@pytest.mark.parametrize("secure", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_tls_on_one_side_only_is_told_to_both(
    authority: Authority, tmp_path: Path, secure: int
) -> None:
    certificates: list[Certificate | None] = [None, None]
    certificates[secure] = authority.certify("right", LOCAL)
    host, initiator = failures(certificates, tmp_path)
    assert isinstance(initiator, errors.ConfigError), repr(initiator)
    assert initiator.rank == 0
    for error in (host, initiator):
        assert "TLS" in str(error) and "on every rank or on none" in str(error)


def test_a_killed_rank_is_named_inside_tls(authority: Authority) -> None:
    env = {**authority.certify("all", LOCAL).variables(), "GRADRING_TRANSPORT": "tcp"}
    assert_lost(survivors(reduce_until_killed, 1, 3, 1, 1_000_000, env=env), 1)


def differ() -> None:
    with gradring.init(transport="tcp") as comm:
        comm.barrier()
        comm.all_reduce(np.ones(4 + comm.rank // 2), name="w")


def test_a_mismatch_is_judged_inside_tls(authority: Authority) -> None:
    variables = authority.certify("all", LOCAL).variables()
    for outcome in run_ranks(differ, 3, env=variables, check=False, timeout=60):
        assert isinstance(outcome.exception, errors.MismatchError), outcome
        assert outcome.exception.rank == 2


def announce_names(how: str) -> None:
    """Ranks that are told names dial names."""
    port = free_ports(1)[0]
    listen, announce = f"localhost:{port}", None
    if how == "announce" and os.environ["GRADRING_RANK"] != "0":
        listen, announce = f"{LOCAL}:{port}", listen
    with gradring.init(transport="tcp", listen=listen, announce=announce) as comm:
        comm.barrier()


@pytest.mark.parametrize("how", [pytest.param("listen", marks=pytest.mark.slow), "announce"])
def test_certificates_may_be_for_names(authority: Authority, how: str) -> None:
    port = free_ports(1)[0]
    variables = authority.certify("all", "localhost").variables()
    variables["GRADRING_RENDEZVOUS"] = f"localhost:{port}"
    run_ranks(announce_names, 3, how, env=variables)


def die_while_forming() -> None:
    """Rank 1 is killed when rank 0 says that it has joined; rank 2 never comes."""
    rank = int(os.environ["GRADRING_RANK"])

    def joined() -> bool:
        rendezvous, token = os.environ["GRADRING_RENDEZVOUS"], os.environ["GRADRING_TOKEN"]
        with contextlib.suppress(errors.RendezvousError):
            tls = Settings.from_environ(os.environ).tls
            return ask_job(rendezvous, token.encode(), tls).missing == (2,)
        return False

    def die() -> None:
        wait_until(joined, "rank 1 has joined")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        threading.Thread(target=die).start()
    if rank < 2:
        gradring.init(transport="tcp", timeout=300)


def test_a_rank_that_ends_while_the_group_forms_is_named_inside_tls(authority: Authority) -> None:
    variables = authority.certify("all", LOCAL).variables()
    host, *_ = run_ranks(die_while_forming, 3, env=variables, check=False, timeout=120)
    assert isinstance(host.exception, errors.RendezvousError), host
    assert host.exception.rank == 1
    assert "ended while the group was forming" in str(host.exception)


def interrupt_a_handshake(rendezvous: str) -> None:
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    gradring.init(rank=1, world_size=2, rendezvous=rendezvous, timeout=300)


def test_ctrl_c_ends_a_handshake_of_tls_with_one_who_says_nothing(authority: Authority) -> None:
    variables = authority.certify("all", LOCAL).variables()
    with socket.create_server((LOCAL, 0)) as silent:
        address = f"{LOCAL}:{silent.getsockname()[1]}"
        (outcome,) = run_ranks(
            interrupt_a_handshake, 1, address, env=variables, check=False, timeout=60
        )
    assert isinstance(outcome.exception, KeyboardInterrupt), outcome


def test_the_benchmark_measures_inside_tls_and_without_in_turns(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in authority.certify("all", LOCAL).variables().items():
        monkeypatch.setenv(name, path)
    table = tmp_path / "measured.json"
    options = ["--transport", "tcp,tls", "--sizes", "64KiB", "--iterations", "5"]
    assert main(["bench", "all-reduce", "--allow-debug", *options, "--json", str(table)]) == 0
    rows = json.loads(table.read_text())
    assert [(row["transport"], row["wrong"]) for row in rows] == [("tcp", 0), ("tls", 0)]


def test_the_benchmark_names_the_certificates_that_it_misses() -> None:
    with pytest.raises(errors.ConfigError, match="GRADRING_TLS_CA"):
        Options(2, (4,), transports=("tls",)).check(allow_debug=True)


def test_some_of_the_variables_are_an_error_that_names_the_others(authority: Authority) -> None:
    variables = authority.certify("all", LOCAL).variables()
    assert Settings.from_environ(variables).tls == TlsFiles(*variables.values())
    for name in variables:
        fewer = {other: text for other, text in variables.items() if other != name}
        with pytest.raises(errors.ConfigError, match=f"{name} not; set all three"):
            Settings.from_environ(fewer)


def connect_alone(tls: TlsFiles) -> Any:
    address = f"{LOCAL}:{free_ports(1)[0]}"
    return gradring.Communicator(0, 2, rendezvous=address, tls=tls, timeout=1)


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.certify("one", LOCAL), authority.certify("other", LOCAL)
    ca, cert, key = authority.path, one.path, one.key
    empty, missing = tmp_path / "empty.pem", tmp_path / "missing.pem"
    empty.touch()
    # Nobody else reads what is taken for a key.
    cert.chmod(0o600)
    for files, name, wrong, problem in [
        ((empty, cert, key), "ca", empty, "read"),
        ((ca, missing, key), "cert", missing, "read"),
        ((ca, cert, cert), "key", cert, "read"),
        ((ca, cert, other.key), "cert", cert, "used"),
    ]:
        said = f"tls.{name} (GRADRING_TLS_{name.upper()}): {wrong} cannot be {problem}"
        with pytest.raises(errors.ConfigError, match=re.escape(said)):
            connect_alone(TlsFiles(*map(str, files)))


def test_a_key_that_others_can_read_is_refused(authority: Authority) -> None:
    certificate = authority.certify("all", LOCAL)
    certificate.key.chmod(0o644)
    with pytest.raises(errors.ConfigError, match=r"^GRADRING_TLS_KEY=.* chmod 600"):
        Settings.from_environ(certificate.variables())
    with pytest.raises(errors.ConfigError, match=r"^tls.key=.* chmod 600"):
        connect_alone(certificate.files())
