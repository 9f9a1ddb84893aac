"""Policies of plain jobs and of those with parameter servers, and the watch, without processes."""

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gradring.errors import ConfigError
from gradring.launch import elastic
from gradring.launch.hosts import Host, place_ranks
from gradring.launch.input_workers import InputWorkers
from gradring.launch.plain import Plain
from gradring.launch.report import Blame
from gradring.launch.servers import Servers
from gradring.launch.slots import LIVED_S
from gradring.launch.supervisor import Policy
from gradring.launch.watch import Watch

HOSTS = [Host("a", 2), Host("b", 1)]
KILLED = -signal.SIGKILL


@dataclass
class Process:
    """As much of a rank's process as a policy looks at."""

    rank: int
    exit_code: int | None = None
    host: str = "a"
    group_is_alive: bool = True
    ending: str = "some way"


@dataclass
class Job:
    """Stands for the supervisor, its processes and its world."""

    policy: Policy
    directory: Path
    grace_s: float = 10.0
    ranks: list[Process] = field(default_factory=list)
    started: list[tuple[int, str]] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    helpers: dict[int, Process] = field(default_factory=dict)
    environs: dict[int, dict[str, str]] = field(default_factory=dict)
    words: dict[int, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = Watch(self)  # type: ignore[arg-type]
        self.processes: Any = self
        self.world: Any = self
        self.policy.begin(self, {"GRADRING_RESTART": "0", "GRADRING_AS_HOROVOD": "1"})  # type: ignore[arg-type]

    def environments(self, environ: dict[str, str]) -> list[dict[str, str]]:
        return [environ] * len([*self.policy.ranks, *self.policy.servers])

    def title(self, number: int) -> str:
        return f"process {number}"

    def failure_of(self, number: int) -> Path:
        return self.directory / str(number)

    def start(self, number: int, environ: dict[str, str], program: Any = None) -> None:
        if number < 0:
            self.failure_of(number).unlink(missing_ok=True)
            self.helpers[number] = Process(number)
            self.words[number] = program.words
        else:
            self.ranks[number : number + 1] = [Process(number)]
        self.environs[number] = environ
        self.started.append((number, environ["GRADRING_RESTART"]))

    def running(self) -> list[Process]:
        return [process for process in self.ranks if process.exit_code is None]

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def ends(self, number: int, exit_code: int, now: float = 0.0) -> list[int]:
        """The numbers of the failures that end the job."""
        process = self.helpers[number] if number < 0 else self.ranks[number]
        process.exit_code, process.group_is_alive = exit_code, False
        failed = self.policy.ended([process], now)  # type: ignore[list-item]
        self.policy.act(now)
        return [each.rank for each in failed]


def plain(directory: Path, ranks: int = 3) -> Job:
    return Job(Plain(place_ranks(HOSTS, ranks), restarts=2), directory)


def with_servers(directory: Path, restarts: int = 0) -> Job:
    return Job(Servers(place_ranks(HOSTS, 2), servers=1, restarts=restarts), directory)


def test_all_ranks_of_a_plain_job_start_and_each_failure_ends_it(tmp_path: Path) -> None:
    job = plain(tmp_path)
    assert [number for number, _ in job.started] == [0, 1, 2]
    assert (job.ends(0, 0), job.ends(2, KILLED)) == ([], [2])


def test_a_rank_that_blames_another_is_not_the_first_to_fail(tmp_path: Path) -> None:
    job = plain(tmp_path)
    assert job.policy.culprit({1: Blame(0, "PeerLostError"), 0: None}) == (0, "")
    assert job.policy.culprit({1: Blame(0, "StallError")}) == (
        1,
        ", but rank 0 on a is to blame (StallError), which still ran or was stopped",
    )


def test_a_host_whose_network_was_cut_is_to_blame_though_its_rank_blames_another(
    tmp_path: Path,
) -> None:
    job = plain(tmp_path)
    told = Blame(2, "PeerLostError")
    assert job.policy.culprit({2: Blame(0, "PeerLostError"), 1: told, 0: told}) == (
        1,
        ", but rank 2 on a is to blame (PeerLostError), which blames rank 0: the network "
        "of a may be cut",
    )


def test_a_loss_that_the_system_has_found_counts_more_than_one_that_was_told(
    tmp_path: Path,
) -> None:
    job = plain(tmp_path)
    told, found = Blame(2, "PeerLostError"), Blame(2, "PeerLostError", by_system=True)
    assert job.policy.culprit({0: told, 1: found})[0] == 1
    # An error of its own is no word of another rank.
    assert job.policy.culprit({0: None, 1: found}) == (0, "")


def test_only_several_ranks_without_a_group_are_told_so(tmp_path: Path) -> None:
    for ranks in (1, 2):
        exit_code, sentence = plain(tmp_path, ranks).policy.outcome()
        assert exit_code == 0 and bool(sentence) == (ranks > 1)
    (tmp_path / "1").touch()
    assert plain(tmp_path, 2).policy.outcome() == (0, None)


def test_servers_are_placed_on_the_hosts_in_turn() -> None:
    servers = Servers(place_ranks(HOSTS, 3), servers=3, restarts=0).servers
    assert [host.name for host in servers] == ["a", "b", "a"]


def test_a_lost_worker_ends_nobody_and_a_lost_server_all(tmp_path: Path) -> None:
    job = with_servers(tmp_path)
    assert job.ends(0, KILLED) == []
    assert job.ends(2, KILLED) == [0, 2]


def test_a_restart_starts_one_process_with_its_attempt(tmp_path: Path) -> None:
    job = with_servers(tmp_path, restarts=1)
    assert job.ends(2, 3, now=0.0) == [] and job.policy.pending
    job.policy.act(0.9)
    assert job.started[3:] == []
    job.policy.act(1.0)
    assert job.started[3:] == [(2, "1")] and not job.policy.pending
    assert job.ends(2, 3) == [2]


def test_servers_must_end_when_a_worker_has_ended_well_and_none_is_left(tmp_path: Path) -> None:
    job = with_servers(tmp_path)
    assert job.ends(0, 0) == [] and not job.watch.is_ending
    assert job.ends(1, 1) == [] and job.watch.is_ending


@pytest.mark.parametrize("last", [0, 1])
def test_a_job_whose_workers_have_all_failed_has_failed(tmp_path: Path, last: int) -> None:
    job = with_servers(tmp_path)
    job.ends(1 - last, 1)
    assert job.ends(last, 1) == [1 - last, last]


def with_input_workers(directory: Path, *, began: bool = True) -> Job:
    ranks = Plain(place_ranks([Host("localhost", 2)], 2), restarts=0)
    job = Job(InputWorkers(ranks, 2, []), directory)
    if began:
        job.failure_of(-1).write_text('{"port": 4711}')
        job.policy.act(0.0)
    return job


def test_ranks_begin_when_the_dispatcher_listens_and_know_where(tmp_path: Path) -> None:
    job = with_input_workers(tmp_path, began=False)
    job.policy.act(0.0)
    assert job.policy.pending and [number for number, _ in job.started] == [-1]
    job.failure_of(-1).write_text('{"port": 4711}')
    job.policy.act(1.0)
    assert not job.policy.pending and [number for number, _ in job.started] == [-1, -2, -3, 0, 1]
    assert job.environs[1]["GRADRING_INPUT_SERVICE"] == "grpc://127.0.0.1:4711"
    # What the start hook puts before TensorFlow is for programs.
    assert job.environs[1].keys() - job.environs[-2].keys() >= {"GRADRING_AS_HOROVOD"}
    assert "GRADRING_AS_HOROVOD" not in job.environs[-1]


def test_an_input_worker_keeps_its_port_also_when_one_start_says_none(tmp_path: Path) -> None:
    job = with_input_workers(tmp_path)
    assert job.words[-2][2:] == ["0", "127.0.0.1:4711"]
    job.failure_of(-2).write_text('{"port": 4712}')
    assert job.ends(-2, KILLED, now=LIVED_S) == []
    job.policy.act(LIVED_S + 1)
    assert job.words[-2][2] == "4712"
    # It has waited for the dispatcher, for however long, and that is a failure in a row.
    assert job.ends(-2, KILLED, now=3 * LIVED_S) == []
    job.policy.act(3 * LIVED_S + 2)
    assert job.words[-2][2] == "4712"
    assert job.ends(-2, KILLED, now=5 * LIVED_S) == [-2]


def test_an_input_worker_that_cannot_stay_ends_the_job(tmp_path: Path) -> None:
    job = with_input_workers(tmp_path)
    assert job.ends(-2, KILLED, now=0.0) == []
    job.policy.act(0.9)
    assert len(job.started) == 5
    job.policy.act(1.0)
    assert job.started[5:] == [(-2, "0")]
    # It has lived for long enough not to count.
    job.failure_of(-2).write_text('{"port": 4712}')
    assert job.ends(-2, KILLED, now=LIVED_S + 1) == []
    job.policy.act(LIVED_S + 2)
    assert job.ends(-2, 1, now=LIVED_S + 3) == []
    job.policy.act(LIVED_S + 5)
    assert job.ends(-2, 1, now=LIVED_S + 6) == [-2]
    assert job.policy.culprit({1: None, -2: None}) == (-2, "")
    # Ranks that fail now do so because of it.
    assert job.ends(0, 1) == [0]


def test_a_lost_dispatcher_ends_the_job_also_before_ranks_begin(tmp_path: Path) -> None:
    assert with_input_workers(tmp_path).ends(-1, KILLED) == [-1]
    job = with_input_workers(tmp_path, began=False)
    assert job.ends(-1, 1) == [-1] and not job.policy.pending


def test_input_workers_are_no_failure_once_the_ranks_have_ended_or_failed(tmp_path: Path) -> None:
    job = with_input_workers(tmp_path)
    assert job.ends(0, 0) == job.ends(1, 0) == []
    assert job.ends(-1, KILLED) == job.ends(-2, KILLED) == []


def test_a_watch_sends_sigterm_once_and_then_sigkill(tmp_path: Path) -> None:
    job = plain(tmp_path)
    assert not job.watch.send_what_is_due()
    job.watch.end(0.0, float("inf"))
    assert job.watch.send_what_is_due() and not job.watch.send_what_is_due()
    job.watch.end(float("inf"), 0.0)
    assert job.watch.send_what_is_due()
    assert job.signals == [signal.SIGTERM, signal.SIGKILL]


def test_a_watch_reads_what_is_there_until_it_is_to_ignore_it(tmp_path: Path) -> None:
    watch, read = plain(tmp_path).watch, []
    reading, writing = os.pipe()
    watch.listen(reading, lambda: read.append(os.read(reading, 1)))
    os.write(writing, b"ab")
    watch.wait(0)
    watch.wait(0)
    watch.ignore(reading)
    os.write(writing, b"c")
    watch.wait(0)
    assert read == [b"a", b"b"]
    watch.close()
    os.close(reading)
    os.close(writing)


def test_a_service_that_others_could_use_is_allowed_by_the_users_word() -> None:
    job = InputWorkers(Plain(place_ranks(HOSTS, 2), restarts=0), 1, HOSTS)
    with pytest.raises(ConfigError, match=r"there may be processes on other hosts.*; give --inp"):
        job.check({}, unprotected=False)
    job.check({}, unprotected=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.TimeoutExpired(["./hosts"], 60.0), "./hosts has not ended within 60 s"),
        (
            subprocess.CalledProcessError(3, ["./hosts"], "", "usage\nno such queue\n"),
            "./hosts ended with exit code 3 and said: no such queue",
        ),
        (
            subprocess.CalledProcessError(-9, ["./hosts"], "a:2", ""),
            "./hosts was killed by SIGKILL and said: nothing",
        ),
        (ValueError("'a:x' has 'x' ranks"), "'a:x' has 'x' ranks"),
    ],
)
def test_what_a_script_of_hosts_has_done_wrong_is_named(error: Exception, said: str) -> None:
    assert elastic._why(error) == said
