"""``gradring doctor``: it names who is stuck, what cannot be reached, and what differs."""

import errno
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launching import DEADLINE_S, gradring, script, started

from gradring import __version__
from gradring.clusters import detect
from gradring.errors import AuthenticationError, ConfigError, RendezvousError
from gradring.machine.ports import free_ports
from gradring.tools import cli
from gradring.tools.doctor import group, running
from gradring.tools.doctor.endpoint import probe
from gradring.tools.doctor.group import link_lines, listening, problems_of
from gradring.tools.doctor.job import Entered, JobState, RankState, ask_job
from gradring.tools.doctor.link_check import CONNECT_S, LinkMeasurement, initiate
from support.commands import completed
from support.waiting import wait_until

TOKEN = "doctors-token"


@contextmanager
def job(directory: Path, text: str, ranks: int = 3, grace_s: int = 1) -> Iterator[str]:
    """Runs a job until the block ends; its rendezvous."""
    noted = directory / "rendezvous"
    head = (
        "import gradring, numpy as np\n"
        f"open({str(noted)!r} + str(rank), 'w').write(os.environ['GRADRING_RENDEZVOUS'])\n"
        f"os.rename({str(noted)!r} + str(rank), {str(noted)!r})\n"
    )
    run = ("run", "-np", ranks, "--grace", grace_s, *script(directory, head + text))
    with started(*run, env={**os.environ, "GRADRING_TOKEN": TOKEN}) as launcher:
        try:
            wait_until(noted.exists, "the ranks have started")
            yield noted.read_text()
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(DEADLINE_S)


def doctor_until(wanted: str, address: str) -> "subprocess.CompletedProcess[str]":
    """Asks again until the report has these words: the job needs a moment to get there."""
    reports: list[subprocess.CompletedProcess[str]] = []

    def found() -> bool:
        reports.append(gradring("doctor", address, GRADRING_TOKEN=TOKEN))
        return re.search(wanted, reports[-1].stdout) is not None

    wait_until(found, f"doctor says {wanted}")
    return reports[-1]


STUCK = (
    "comm = gradring.init()\n"
    "comm.all_reduce(np.ones(4), name='fine')\n"
    "if rank == 1: time.sleep(300)\n"
    "comm.all_reduce(np.ones(4), name='stuck')\n"
)


def test_a_rank_that_sleeps_in_python_is_named(tmp_path: Path) -> None:
    with job(tmp_path, STUCK) as address:
        report = doctor_until("ranks 0 and 2 wait since", address)
    assert report.returncode == 1
    lines = report.stdout.splitlines()
    (problem,) = [line for line in lines if line.startswith("problem:")]
    assert re.search(
        r"rank 1 on \S+ keeps the others waiting: it has not entered #2 "
        r"all_reduce\(sum\) 'stuck' float64\[4\], in which ranks 0 and 2 wait since \d+\.\d s; "
        r"it left #1 all_reduce\(sum\) 'fine' float64\[4\] \d+\.\d s ago and is busy elsewhere",
        problem,
    )
    rank_0, rank_1, rank_2 = [line.strip() for line in lines if line.strip().startswith("rank ")]
    assert re.search(r"^rank 0 .* is in #2 .* since .* waits for rank", rank_0)
    assert re.search(r"^rank 1 .* is in no collective; left #1", rank_1)
    assert re.search(r"^rank 2 .* is in #2 .* waits for rank 1$", rank_2)


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy shows the stack")
def test_what_the_doctor_says_to_type_shows_where_a_rank_is(tmp_path: Path) -> None:
    with job(tmp_path, STUCK) as address:
        report = doctor_until("keeps the others waiting", address)
        said = re.search(r"\((py-spy dump --pid \d+) on ", report.stdout)
        assert said is not None
        dumped = completed(said[1].split())
    assert dumped.returncode == 0, dumped.stderr
    assert re.search(r"<module> \(\S*train\.py:\d+\)", dumped.stdout)


def test_python_that_holds_the_interpreter_for_ever_does_not_keep_a_rank_from_answering(
    tmp_path: Path,
) -> None:
    # A regular expression that backtracks without end never releases the interpreter.
    stuck = STUCK.replace("time.sleep(300)", "__import__('re').match('(a+)+$', 'a' * 60 + 'b')")
    with job(tmp_path, stuck, ranks=2) as address:
        report = doctor_until("keeps the others waiting", address)
    assert re.search(r"problem: rank 1 on \S+ keeps the others waiting", report.stdout)


IN_A_RECV = (
    "comm = gradring.init()\n"
    "if rank == 2: time.sleep(300)\n"
    "if rank == 1: comm.recv(np.ones(4), 2, name='late')\n"
    "comm.all_reduce(np.ones(4), name='stuck')\n"
)


def test_who_waits_for_a_partner_is_told_from_the_rank_that_it_waits_for(tmp_path: Path) -> None:
    with job(tmp_path, IN_A_RECV) as address:
        report = doctor_until(r"rank 2 on \S+ keeps the others waiting", address)
        report = doctor_until(r"problem: rank 1 on \S+ waits in", address)
    assert report.returncode == 1
    assert re.search(
        r"problem: rank 1 on \S+ waits in recv\(source=2\) 'late' float64\[4\] since \d+\.\d s: "
        "rank 2 takes no part in it",
        report.stdout,
    )
    assert re.search(r"rank 1 \S+ \S+ \(process \d+\) is in recv\(source=2\) 'late'", report.stdout)
    assert not re.search(r"rank 1 on \S+ keeps", report.stdout)


def stopped(rank: int) -> str:
    """A job of which one rank is stopped; the others stay when they have noticed."""
    return (
        "comm = gradring.init()\n"
        f"if rank == {rank}: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "try: comm.barrier()\n"
        "except gradring.errors.GradringError: pass\n"
        "time.sleep(300)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "ranks", "said"),
    [
        (0, 2, "rank 0 of a job should answer here, but: .*no answer in time"),
        # The ranks notice it themselves after some seconds.
        (1, 3, r"rank 1 does not answer|has failed: .*\brank 1 on"),
    ],
)
def test_a_stopped_rank_is_named(tmp_path: Path, rank: int, ranks: int, said: str) -> None:
    with job(tmp_path, stopped(rank), ranks) as address:
        assert doctor_until(said, address).returncode == 1


def test_without_rank_0_the_ranks_that_run_here_are_named(tmp_path: Path) -> None:
    text = (
        "comm = gradring.init()\n"
        f"pid = {str(tmp_path / 'pid')!r}\n"
        "if rank == 0:\n"
        "    while not all(os.path.exists(pid + other) for other in '12'): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "noted = pid + str(rank)\n"
        "open(noted + '-', 'w').write(str(os.getpid()))\n"
        "os.rename(noted + '-', noted)\n"
        "time.sleep(300)\n"
    )
    noted = [tmp_path / f"pid{rank}" for rank in (1, 2)]
    with job(tmp_path, text, grace_s=240) as address:
        wait_until(lambda: all(file.exists() for file in noted), "the group has formed")
        report = doctor_until("rank 0 has ended", address)
        everything = gradring("doctor")
        pids = [file.read_text() for file in noted]
    said = (
        f"{address}: rank 0 has ended, does not listen yet, or cannot be reached (127.0.0.1 "
        f"refuses: no process listens at port {address.rpartition(':')[2]} there); running here: "
        f"ranks 1 and 2 (processes {' and '.join(pids)})\n"
    )
    for found in (report, everything):
        assert found.returncode == 1 and said in found.stdout


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "but it is no gradring rank of this version: "),
        pytest.param(
            b"",
            "but does not answer as rank 0 of a gradring job would: the connection broke",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_listener_that_is_not_gradrings_is_told_from_rank_0(answer: bytes, said: str) -> None:
    class Stranger(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        report = gradring("doctor", address)
        server.shutdown()
    assert report.returncode == 1
    assert f"{address}: something listens there, {said}" in report.stdout


def test_a_job_in_which_nobody_waits_is_well(tmp_path: Path) -> None:
    text = "comm = gradring.init()\ncomm.barrier()\ntime.sleep(300)\n"
    with job(tmp_path, text) as address:
        report = doctor_until("waited for more than 1 s; the last collective is #1", address)
    assert report.returncode == 0


def test_ranks_that_have_not_joined_are_named(tmp_path: Path) -> None:
    with job(tmp_path, "time.sleep(300 if rank == 2 else 0)\ngradring.init()\n") as address:
        report = doctor_until("rank 2 of 3 has not joined", address)
    assert report.returncode == 1


def test_jobs_on_this_machine_are_found_with_their_token_and_explained_with_a_wrong_one(
    tmp_path: Path,
) -> None:
    with job(tmp_path, STUCK) as address:
        doctor_until("keeps the others waiting", address)
        port = address.rpartition(":")[2]
        reports = [gradring("doctor", *where) for where in ((), (address,), (f"localhost:{port}",))]
        guessed = gradring("doctor", address, GRADRING_TOKEN="guess")
    assert guessed.returncode == 1
    assert "does not answer this command" in guessed.stdout and "token" in guessed.stdout
    for report in reports:
        assert f"job at {address}: 3 ranks\n" in report.stdout
        assert re.search(r"problem: rank 1 on \S+ keeps the others waiting", report.stdout)
        assert TOKEN not in report.stdout + report.stderr


def test_a_job_is_found_whose_token_is_in_a_file_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    (port,) = free_ports(1)
    program = "import gradring, time; comm = gradring.init(); time.sleep(60)"
    cluster = {
        "GRADRING_WORLD_SIZE": "2",
        "GRADRING_RENDEZVOUS": f"127.0.0.1:{port}",
        "GRADRING_TOKEN_FILE": "token",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, **cluster, "GRADRING_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        doctor_until("all ranks answer", f"127.0.0.1:{port}")
        assert f"job at 127.0.0.1:{port}: 2 ranks\n" in gradring("doctor").stdout
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_under_the_launcher_every_pair_is_measured() -> None:
    done = gradring("run", "-np", 3, "-m", "gradring", "doctor")
    for pair in ("0-1", "0-2", "1-2"):
        pattern = rf"\[0\] {pair} +\d+ us +\d+\.\d+ GB/s +-?\d+\.\d ms"
        assert re.search(pattern, done.stdout), done.stdout
    assert re.search(r"rank 2 on \S+, 127.0.0.1 \(lo\), .* gradring \d.*Python 3", done.stdout)
    # Other programs may take a link's cores.
    problems = re.findall(r"^\[0\] problem: (.*)$", done.stdout, re.M)
    assert all(" is slow: " in problem for problem in problems), problems
    assert done.returncode == (1 if problems else 0), done.stdout + done.stderr
    assert problems or "all 3 ranks reach each other" in done.stdout


def test_links_are_measured_through_the_ports_that_are_allowed() -> None:
    (first,) = free_ports(1)
    with (
        listening("127.0.0.1", (first, first + 9)) as one,
        listening("127.0.0.1", (first, first + 9)) as other,
        listening("127.0.0.1", (first, first)) as outside,
    ):
        ports = [server.getsockname()[1] for server in (one, other, outside)]
    assert first <= ports[0] < ports[1] <= first + 9 and ports[2] != first


@pytest.mark.parametrize("readings", [0, 3])
def test_a_link_that_ends_while_it_is_measured_is_a_problem(readings: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_early() -> None:
            end, _ = server.accept()
            for _ in range(readings):
                end.recv(1)
                end.sendall(bytes(8))
            end.recv(1)
            end.close()

        ending = threading.Thread(target=end_early)
        ending.start()
        address, port = server.getsockname()
        found = initiate((address, port), same_host=True, bandwidth=True)
        ending.join()
    assert found.problem == f"{address}:{port}: the other rank has closed its connection"


def test_a_pair_that_cannot_connect_ends_no_group_that_had_little_time_to_form() -> None:
    with (
        mock.patch("gradring.init", side_effect=ConfigError("asked")) as init,
        pytest.raises(ConfigError, match="asked"),
    ):
        group.examine(detect(), 1.0, print)
    assert init.call_args.kwargs["timeout"] == 1
    assert init.call_args.kwargs["stall_timeout"] > 2 * CONNECT_S  # which one of the pair waits


def test_a_group_that_does_not_form_names_the_missing_rank() -> None:
    (port,) = free_ports(1)
    done = gradring(
        *("doctor", "--timeout", "2"),
        GRADRING_RANK="0",
        GRADRING_WORLD_SIZE="2",
        GRADRING_RENDEZVOUS=f"127.0.0.1:{port}",
    )
    assert done.returncode == 1
    assert "rank 1 of 2 did not join rank 0" in done.stderr


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "127.0.0.1 refuses: no process listens at port 1"),
        ("no-such-host.invalid:29500", "'no-such-host.invalid' has no address here"),
    ],
)
def test_an_address_that_cannot_be_reached_says_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    # Name servers that do not answer would take long.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    assert said in str(probe(address).problem)
    done = gradring("doctor", address)
    assert done.returncode == 1 and said in done.stdout


def state(rank: int, entered: int | None, ended: int, age_s: float = 5.0) -> RankState:
    inside = None if entered is None else Entered(entered, "barrier", age_s)
    return RankState(rank, "h", 100 + rank, inside, (), Entered(ended, "barrier", age_s), None)


def test_a_rank_in_an_earlier_collective_is_not_blamed_but_the_one_outside_is() -> None:
    job = JobState(3, {0: state(0, 7, 6), 1: state(1, 6, 5), 2: state(2, None, 5)}, {})
    well, sentences = job.verdict()
    assert not well and len(sentences) == 1 and sentences[0].startswith("rank 2 on h keeps")


def test_a_rank_that_sends_to_one_that_is_in_a_collective_is_blamed() -> None:
    first = replace(state(0, 2, 1), awaited=(1,))
    sending = Entered(1, "send(dest=0) 'a' float64[3]", 6.0)
    second = replace(state(1, None, 1), awaited=(0,), beside=sending)
    well, sentences = JobState(2, {0: first, 1: second}, {}).verdict()
    assert not well and sentences[0].startswith("rank 1 on h keeps the others waiting")
    assert "has not entered #2 barrier, in which rank 0 waits" in sentences[0]
    assert "is in send(dest=0) 'a' float64[3]" in sentences[0]


def asked(patch: pytest.MonkeyPatch, *answers: Any) -> JobState:
    """What is known of a job of which each rank, such as 127.0.0.1:0, answers so, or raises.

    An answer may be a part of that of a rank which is in its group, and in no collective.
    """

    def inquire(address: str, *_: object) -> Any:
        rank = int(address.rpartition(":")[2])
        if isinstance(answers[rank], Exception):
            raise answers[rank]
        nothing = dict.fromkeys(("entered", "ended", "failed", "beside"))
        place = {"rank": rank, "world_size": len(answers), "host": "h", "process_id": 7}
        members = [(f"127.0.0.1:{other}", "h") for other in range(len(answers))]
        group = {"formed": True, "awaited": [], "members": members, "group": "a"}
        return {**nothing, **place, **group, **answers[rank]}

    patch.setattr("gradring._native.inquire", inquire)
    return ask_job("127.0.0.1:0", None)


def test_a_rank_of_another_group_is_not_taken_for_one_of_this(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = asked(monkeypatch, {}, {"group": "b"}, {})
    assert sorted(state.states) == [0, 2]
    assert "another group" in state.silent[1] and "127.0.0.1:1" in state.silent[1]


@pytest.mark.parametrize(
    ("answers", "silent"),
    [
        (RendezvousError("no answer in time"), "h, 127.0.0.1:1: no answer in time"),
        ({"formed": False}, "a process of another group, or another rank, answers at 127.0.0.1:1"),
    ],
)
def test_a_rank_that_does_not_answer_as_one_of_the_group_hides_no_other(
    answers: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(monkeypatch, {}, answers)
    assert found.silent == {1: silent}
    assert [str(each) for each in found.states.values()] == [
        "rank 0 on h (process 7) is in no collective"
    ]
    well, (sentence,) = found.verdict()
    assert not well and sentence == (
        f"rank 1 does not answer ({silent}): it has ended, is stopped, or its host cannot be "
        "reached"
    )


def test_a_certificate_that_one_rank_does_not_accept_is_none_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AuthenticationError, match="another certificate"):
        asked(monkeypatch, {}, AuthenticationError("another certificate"))


@pytest.mark.parametrize(
    ("answer", "well", "said"),
    [
        ({"missing": None, "runs": False}, False, "this process waits to join an elastic job, and"),
        ({"missing": None, "runs": True}, False, "this process of an elastic job is between two g"),
        ({"missing": []}, True, "the group is about to form: all ranks have joined"),
        ({"missing": [1, 2]}, False, "the group is still forming: ranks 1 and 2 of 3 have not joi"),
    ],
)
def test_a_process_without_a_group_says_what_it_waits_for(
    answer: dict[str, Any], well: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, (sentence,) = asked(monkeypatch, {"formed": False, **answer}, {}, {}).verdict()
    assert found == well and sentence.startswith(said)


def test_a_group_that_has_failed_says_why_and_no_more() -> None:
    failed = replace(state(1, 7, 6), failed="rank 2 on h: its process has ended")
    job = JobState(3, {0: state(0, 7, 6), 1: failed}, {2: "refuses"})
    assert job.verdict() == (False, [f"the group has failed: {failed.failed}"])


def test_a_collective_that_all_have_entered_is_long_or_its_network_is_stuck() -> None:
    waiting = [replace(state(rank, 7, 6), awaited=(1 - rank,)) for rank in range(2)]
    well, (sentence,) = JobState(2, dict(enumerate(waiting)), {}).verdict()
    assert not well
    assert sentence.startswith("ranks 0 and 1 wait in #7 barrier, which all ranks have entered: it")


def test_a_job_that_has_called_nothing_yet_is_well() -> None:
    idle = replace(state(0, None, 1), ended=None)
    said = "all ranks answer; no collective has been called yet"
    assert JobState(1, {0: idle}, {}).verdict() == (True, [said])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "127.0.0.1 does not answer within 5 s; a firewall may drop its packets"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "127.0.0.1: No route to host"),
    ],
)
def test_what_keeps_an_address_from_answering_is_told_apart(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*_: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(running, "running_jobs", list)
    assert cli.main(["doctor", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == f"127.0.0.1:1 (127.0.0.1): {said}\n"


def test_without_any_job_the_doctor_says_so_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "running_jobs", list)
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    why, versions, *_, none, elsewhere, links = said.splitlines()
    assert why == (
        "this process is in no job: no launcher's variables are set, so this process is a world of "
        "one."
    )
    assert versions.startswith(f"versions: gradring {__version__}, Python ")
    assert versions.endswith("; settings: gradring env")
    assert none == "no gradring job of this user runs on this machine"
    assert elsewhere.endswith(": gradring doctor HOST:PORT")
    assert links.endswith(": gradring run -np 2 gradring doctor")


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ({}, "something listens there, but does not answer as rank 0 of a gradring job would: no"),
        ({1: 77}, "rank 0 of a job should answer here, but: no answer in time"),
    ],
)
def test_a_place_that_does_not_answer_is_rank_0s_if_ranks_of_the_job_run_here(
    processes: dict[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def inquire(*_: object) -> Any:
        raise RendezvousError("no answer in time", advice="start rank 0")

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = running.RunningJob(address, processes=processes)
        monkeypatch.setattr(running, "running_jobs", lambda: [found])
        monkeypatch.setattr("gradring._native.inquire", inquire)
        assert cli.main(["doctor", address]) == 1
    printed = capsys.readouterr().out
    assert f"{address}: {said}" in printed
    assert "start rank 0" not in printed


def test_a_rank_that_finds_no_group_says_what_it_sees_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    place = {"RANK": "1", "WORLD_SIZE": "2", "RENDEZVOUS": f"127.0.0.1:{port}"}
    for name, value in place.items():
        monkeypatch.setenv(f"GRADRING_{name}", value)
    with mock.patch("gradring.init", side_effect=RendezvousError("nobody is there")):
        assert cli.main(["doctor"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"rank 1 on \S+ is not in the group: nobody is there", first)
    assert second.startswith(f"rank 1: 127.0.0.1:{port} (127.0.0.1): 127.0.0.1 refuses: no process")
    with mock.patch("gradring.init", side_effect=ConfigError("of two jobs")):
        assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "gradring doctor: of two jobs\n"


def test_a_pair_that_cannot_reach_each_other_has_no_numbers() -> None:
    _, line, _ = link_lines(
        {"0-1": LinkMeasurement(problem="10.0.0.3:5: No route"), "0-2": LinkMeasurement(9.0)}
    )
    assert line.split(maxsplit=2) == ["0-1", "unreachable", "10.0.0.3:5: No route"]


def test_short_waits_are_no_problem() -> None:
    job = JobState(2, {0: state(0, 7, 6, 0.1), 1: state(1, None, 6, 0.1)}, {})
    well = "all ranks answer and none has waited for more than 1 s; the last collective is #7"
    assert job.verdict() == (True, [well])


def test_equal_clocks_are_not_less_than_0_apart() -> None:
    (_, line) = link_lines({"0-1": LinkMeasurement(50.0, 1.0, -0.04)})
    assert line.split() == ["0-1", "50", "us", "1.00", "GB/s", "0.0", "ms"]


@pytest.mark.parametrize("timeout", ["-1", "nan", "soon", "1_0"])
def test_a_timeout_that_is_no_time_is_refused(timeout: str) -> None:
    done = gradring("doctor", f"--timeout={timeout}")
    assert done.returncode == 2
    assert f"'{timeout}' is not a number of seconds of at least 0" in done.stderr


def test_differences_between_ranks_are_problems() -> None:
    facts = [{"versions": {"keras": text, "kernel": text}} for text in ("3.10", "3.11")]
    measured = {
        "0-1": LinkMeasurement(50.0, 1.0, 200.0),
        "0-2": LinkMeasurement(50.0, 0.1, 0.0),
        "1-2": LinkMeasurement(problem="10.0.0.3:5: No route to host"),
        "1-3": LinkMeasurement(50.0, 1.0, -1e5),
        "2-3": LinkMeasurement(50.0, 1.0, 2.2e11),
    }
    problems = problems_of(facts, measured)
    assert problems == [
        "ranks 1-2 cannot reach each other: 10.0.0.3:5: No route to host",
        "versions of keras differ: rank 0 has 3.10, rank 1 has 3.11",
        "the clocks of ranks 0-1 are 200 ms apart: logs and traces will not line up; run an NTP "
        "client",
        "the link between ranks 0-2 is slow: 0.10 GB/s, where 1.00 GB/s is usual",
        "the clocks of ranks 1-3 are -100 s apart: logs and traces will not line up, and "
        "certificates may count as invalid; run an NTP client",
        "the clocks of ranks 2-3 are 2,546 days apart: logs and traces will not line up, and "
        "certificates may count as invalid; run an NTP client",
    ]
