"""``gradring run --min-np``: ranks that fail start again one by one, and hosts come and go.

The programs of these tests know by files that others have come as far as they need.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_stand_in
from launching import DEADLINE_S, executable, gradring, hosts_script, started, wait_until_gone

from gradring.config.parse import JOIN
from gradring.testing import simulated_hosts
from support.commands import command_line, succeeded
from support.waiting import wait_until

HEAD = """\
import json, os, signal, sys, time
joins = "GRADRING_JOIN" in os.environ
rank = -1 if joins else int(os.environ["GRADRING_RANK"])
attempt = int(os.environ["GRADRING_RESTART"])
def note(name, text=""):
    with open(f"{HERE}/{name}-{os.getpid()}", "w") as file: file.write(text)
    os.rename(f"{HERE}/{name}-{os.getpid()}", f"{HERE}/{name}")
def wait_for(name):
    while not os.path.exists(f"{HERE}/{name}"): time.sleep(0.01)
def wait_until_gone(name):
    wait_for(name)
    pid = open(f"{HERE}/{name}").read()
    while os.path.exists(f"/proc/{pid}"): time.sleep(0.01)
def wait_until_said(words):
    while words not in open(f"{HERE}/errors").read(): time.sleep(0.05)
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""


def program(directory: Path, text: str) -> list[str]:
    """A program for ranks, of which those that join have no rank yet."""
    path = directory / "elastic.py"
    path.write_text(f"HERE = {str(directory)!r}\n{HEAD}{text}")
    return [sys.executable, str(path)]


@contextlib.contextmanager
def launcher(
    directory: Path, *arguments: object, **variables: str
) -> "Iterator[subprocess.Popen[bytes]]":
    """A launcher in the background, whose errors are in the file ``errors``."""
    with (
        (directory / "errors").open("wb") as errors,
        started("run", *arguments, env={**os.environ, **variables}, stderr=errors) as process,
    ):
        yield process


def errors_of(directory: Path, *arguments: object, **variables: str) -> str:
    """What a launcher that succeeds has said, which its ranks could read all the while."""
    with launcher(directory, *arguments, **variables) as run:
        code = run.wait(DEADLINE_S)
    errors = (directory / "errors").read_text()
    assert code == 0, errors
    return errors


def test_a_rank_starts_again_while_the_others_go_on(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ranks = program(
        tmp_path,
        "print(attempt, flush=True)\n"
        "if rank == 1: wait_for('begun'), die()\n"
        "if joins: note('joined')\n"
        "if rank == 0: note('begun'), wait_for('joined'), print('went on')\n",
    )
    done = succeeded("run", "-np", 2, "--min-np", 1, "--log-dir", logs, *ranks)
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[0] went on", "[1] 0", "[1] 1"]
    assert (logs / "rank-1.log").read_text() == "0\n1\n"
    assert re.fullmatch(
        r"gradring run: worker 1 on \S+ failed \(killed by SIGKILL\); it is started again in 1 s, "
        r"to join the others\n",
        done.stderr,
    )


def test_a_rank_that_starts_again_is_told_its_place_and_where_the_others_are(
    tmp_path: Path,
) -> None:
    ranks = program(
        tmp_path,
        "mine = {k: v for k, v in os.environ.items() if k.startswith('GRADRING') or k[:3] == 'TF_'}"
        "\nnote(f'found-{rank}', json.dumps(mine))\n"
        "if rank == 1: sys.exit(3)\n"
        "if rank != -1: wait_for('found--1')\n",
    )
    succeeded("run", "-np", 3, "--max-np", 3, *ranks, env={JOIN: "inherited:1"})
    zero, one, two, again = (
        json.loads((tmp_path / f"found-{rank}").read_text()) for rank in (0, 1, 2, -1)
    )
    cluster = json.loads(one["TF_CONFIG"])["cluster"]["worker"]
    ports = [found["GRADRING_PORT"] for found in (zero, one, two)]
    assert cluster == [f"127.0.0.1:{port}" for port in ports] and len(set(ports)) == 3
    assert zero["GRADRING_RENDEZVOUS"] == cluster[0] and JOIN not in zero
    # The first group may not have formed yet.
    assert again[JOIN] == f"auto,{cluster[0]},{cluster[2]}"
    for same in ("GRADRING_PORT", "GRADRING_JOB_ID", "GRADRING_TOKEN", "GRADRING_FAILURE_FILE"):
        assert again[same] == one[same]
    assert (one["GRADRING_RESTART"], again["GRADRING_RESTART"]) == ("0", "1")
    place = {"GRADRING_RANK", "GRADRING_WORLD_SIZE", "GRADRING_RENDEZVOUS", "TF_CONFIG"}
    assert {name: again[name] for name in place} == {name: one[name] for name in place}


def test_a_rank_that_comes_to_join_when_the_others_have_ended_well_ends_so_too(
    tmp_path: Path,
) -> None:
    """One has found the job, and asks in vain to join; one finds none, and would begin another."""
    ranks = program(
        tmp_path,
        "import gradring, gradring.elastic\n"
        "own = int(os.environ['GRADRING_RANK'])\n"
        # While it still imports its modules, a process would be ended without a line.
        "if joins and own == 1: note('here'), wait_for('over')\n"
        "with gradring.init() as comm:\n"
        "    if joins: note('found'), wait_for('over')\n"
        "    @gradring.elastic.run(comm)\n"
        "    def train(state):\n"
        "        if own: wait_for('begun'), die()\n"
        "        note('begun'), wait_for('found'), wait_for('here')\n"
        "        while comm.world_size > 1: comm.barrier()\n"
        "    train(gradring.elastic.State())\n"
        "    print('trained', flush=True)\n"
        "note('over')\n",
    )
    done = succeeded("run", "-np", 3, "--min-np", 1, *ranks)
    assert done.stdout == "[0] trained\n"
    assert "Traceback" not in done.stderr
    said = "the job has ended well before this process has joined it: nothing is left to do"
    assert done.stderr.count(said) == 2


@pytest.mark.parametrize("where", ["imports", "makes its model"])
def test_a_rank_that_has_yet_to_join_when_the_others_have_ended_well_is_told_to_end(
    tmp_path: Path, where: str
) -> None:
    """It hears nothing of what those hear that wait for the others already."""
    ranks = program(
        tmp_path,
        f"def late():\n"
        "    note('late')\n"
        "    while True: time.sleep(1)\n"
        f"if joins and {where == 'imports'}: late()\n"
        "import gradring, gradring.elastic\n"
        "with gradring.init() as comm:\n"
        "    if joins: late()\n"
        "    @gradring.elastic.run(comm)\n"
        "    def train(state):\n"
        "        if rank: wait_for('begun'), die()\n"
        "        note('begun'), wait_for('late')\n"
        "    train(gradring.elastic.State())\n"
        "    print('trained', flush=True)\n",
    )
    done = succeeded("run", "-np", 2, "--min-np", 1, "--grace", 1, *ranks)
    assert done.stdout == "[0] trained\n"
    assert re.search(
        r"worker 1 on \S+ must leave within 0.5 s: the job has ended well before it has joined",
        done.stderr,
    )


@ssh_stand_in.needs_addresses
def test_a_rank_that_has_joined_on_another_host_may_take_its_time_to_end(tmp_path: Path) -> None:
    """It has until the launcher has told another one, which has not joined."""
    ssh = ssh_stand_in.install(tmp_path)
    ranks = program(
        tmp_path,
        "import gradring, gradring.elastic\n"
        "own = int(os.environ['GRADRING_RANK'])\n"
        "if joins and own == 1: note('late'), wait_for('never')\n"
        "with gradring.init() as comm:\n"
        "    @gradring.elastic.run(comm)\n"
        "    def train(state):\n"
        "        if rank > 0: wait_for('begun'), die()\n"
        "        note('begun')\n"
        "        if not joins: wait_for('late')\n"
        "        while comm.world_size != 2: comm.barrier(), state.commit()\n"
        "    train(gradring.elastic.State())\n"
        "if own: wait_until_said('must leave')\n"
        "note(f'saved-{own}')\n",
    )
    options = ["--hosts", "localhost:2,me@127.0.0.2", "-np", 3, "--min-np", 1, "--grace", 1]
    told = re.findall("worker (.) on .* must leave", errors_of(tmp_path, *options, *ranks, **ssh))
    assert told == ["1"] and (tmp_path / "saved-2").exists()


def test_ports_that_the_user_gives_are_used(tmp_path: Path) -> None:
    ranks = program(tmp_path, "print(os.environ['GRADRING_PORT'])")
    done = gradring("run", "-np", 2, "--min-np", 2, *ranks, GRADRING_PORT="29700-29703")
    assert sorted(done.stdout.splitlines()) == ["[0] 29700", "[1] 29701"], done.stderr
    done = gradring("run", "-np", 2, "--min-np", 2, *ranks, GRADRING_PORT="29700")
    assert done.returncode == 2
    assert "GRADRING_PORT=29700 has fewer ports than localhost has ranks (2)" in done.stderr


def test_when_all_ranks_fail_the_job_ends_with_the_report_of_the_first(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "if rank == 1: note('gone', str(os.getpid())), sys.exit(7)\n"
        "wait_until_gone('gone')\n"
        "raise ValueError('all alone')\n",
    )
    done = gradring("run", "-np", 2, "--min-np", 1, *ranks)
    assert done.returncode == 7
    last = done.stderr.rpartition("gradring run: ")[2]
    assert re.match(r"worker 1 on \S+ failed first \(exit code 7\); it printed nothing", last)
    assert "[0] ValueError: all alone" in done.stderr


def test_ranks_that_errors_name_are_not_taken_for_numbers_of_workers(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "if rank == 1:\n"
        "    failure = json.dumps({'kind': 'PeerLostError', 'rank': 1})\n"
        "    open(os.environ['GRADRING_FAILURE_FILE'], 'w').write(failure)\n"
        "    note('gone', str(os.getpid())), sys.exit(1)\n"
        "wait_until_gone('gone')\n"
        "sys.exit(9)\n",
    )
    done = gradring("run", "-np", 2, "--min-np", 1, "--max-restarts", 0, *ranks)
    assert done.returncode == 9, done.stderr
    assert re.search(r"worker 0 on \S+ failed first \(exit code 9\); ", done.stderr)


def test_failures_that_a_restart_has_answered_are_not_reported_at_the_end(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "if rank == 1: sys.exit(7)\n"
        "if joins: note('joined', str(os.getpid())), time.sleep(300)\n"
        "wait_for('joined')\n"
        "os.kill(int(open(f'{HERE}/joined').read()), signal.SIGKILL)\n"
        "sys.exit(9)\n",
    )
    done = gradring("run", "-np", 2, "--min-np", 1, *ranks)
    last = done.stderr.rpartition("gradring run: ")[2]
    assert "exit code 7" not in last and done.returncode in (9, 137), done.stderr


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (("--max-restarts", 1), "it is not started again (--max-restarts 1)"),
        (("--host-failures", 2), "(exit code 3); localhost is given up after 2 failures in a row"),
    ],
    ids=["of the job", "of the host"],
)
def test_restarts_are_bounded_and_the_others_go_on(
    tmp_path: Path, bound: tuple[str, int], said: str
) -> None:
    ranks = program(tmp_path, f"if rank != 0: sys.exit(3)\nwait_until_said({said!r})\n")
    errors = errors_of(tmp_path, "-np", 2, "--min-np", 1, *bound, *ranks)
    assert errors.count("it is started again in 1 s") == 1 and said in errors


def test_a_rank_that_fails_after_another_has_ended_well_fails_the_job(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "if rank == 0: note('done', str(os.getpid())), sys.exit(0)\n"
        "wait_until_gone('done')\n"
        "sys.exit(5)\n",
    )
    done = gradring("run", "-np", 2, "--min-np", 1, *ranks)
    assert done.returncode == 5
    assert "worker 1 on" in done.stderr and "started again" not in done.stderr


def test_a_rank_that_came_too_late_to_join_fails_no_job_that_is_done(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "if rank == 1: sys.exit(1)\n"
        "if rank == 0: wait_for('late'), note('done', str(os.getpid())), sys.exit(0)\n"
        "note('late'), wait_until_gone('done')\n"
        "failure = json.dumps({'kind': 'RendezvousError', 'rank': None})\n"
        "open(os.environ['GRADRING_FAILURE_FILE'], 'w').write(failure)\n"
        "sys.exit(1)\n",
    )
    succeeded("run", "-np", 2, "--min-np", 1, *ranks)


#: What ends a worker without its program's doing.
LOSSES = {
    "host": "os.kill(os.getppid(), signal.SIGKILL), time.sleep(300)",
    "killed": "die()",
    "preempted": "os.kill(os.getpid(), signal.SIGTERM), time.sleep(300)",
}


@ssh_stand_in.needs_addresses
@pytest.mark.parametrize("least", [2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_noticed_when_the_others_have_ended_well_fails_no_job_with_enough_of_them(
    tmp_path: Path, loss: str, least: int
) -> None:
    ranks = program(
        tmp_path,
        f"if rank == 2 and {loss == 'host'}: wait_for('begun'), {LOSSES[loss]}\n"
        f"if rank == 2: wait_for('over'), {LOSSES[loss]}\n"
        "if rank == 0: note('begun'), note('done', str(os.getpid()))\n"
        "else: wait_until_gone('done'), note('over')\n",
    )
    ssh = ssh_stand_in.install(tmp_path) | {"SSH_STAND_IN_NOTICES": str(tmp_path / "over")}
    hosts = ["--hosts", "localhost:2,me@127.0.0.2", "-np", 3, "--min-np", least]
    done = gradring("run", *hosts, *ranks, **ssh)
    how = {
        "host": r"connection lost, ssh exit code 255",
        "killed": "killed by SIGKILL",
        "preempted": "killed by SIGTERM",
    }[loss]
    if least == 2:
        said = rf"gradring run: the job has ended well without worker 2 on 127\.0\.0\.2 \({how}\)"
        assert (done.returncode, "failed first" in done.stderr) == (0, False), done.stderr
    else:
        said = rf"gradring run: worker 2 on 127\.0\.0\.2 failed first \({how}\); "
        assert done.returncode == {"host": 255, "killed": 137, "preempted": 143}[loss]
    assert re.search(said, done.stderr), done.stderr


@ssh_stand_in.needs_addresses
def test_a_host_that_is_lost_and_does_not_come_back_fails_no_job(tmp_path: Path) -> None:
    """The launcher notices it while the others train, and tries to start its worker again."""
    ranks = program(
        tmp_path,
        f"if rank == 1: note('gone', '127.0.0.2'), {LOSSES['host']}\n"
        "wait_until_said('is given up')\n",
    )
    ssh = ssh_stand_in.install(tmp_path) | {"SSH_STAND_IN_GONE": str(tmp_path / "gone")}
    options = ["--hosts", "localhost,me@127.0.0.2", "--min-np", 1, "--host-failures", 2]
    errors = errors_of(tmp_path, *options, *ranks, **ssh)
    assert "worker 1 on 127.0.0.2 is lost (connection lost, ssh exit code 255); it is s" in errors


@ssh_stand_in.needs_addresses
def test_an_exit_code_of_255_is_the_ranks_own_unless_ssh_has_failed(tmp_path: Path) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    ranks = program(tmp_path, "sys.exit(-1)")
    done = gradring("run", "--hosts", "me@127.0.0.2", *ranks, **ssh)
    assert done.returncode == 255
    assert "rank 0 on 127.0.0.2 failed first (exit code 255); it printed nothing" in done.stderr
    ranks = program(tmp_path, LOSSES["host"])
    done = gradring("run", "--hosts", "me@127.0.0.2", *ranks, **ssh)
    assert done.returncode == 255
    assert "rank 0 on 127.0.0.2 failed first (connection lost, ssh exit code 255)" in done.stderr
    assert done.stderr.splitlines()[-2] == "[0] Timeout, server 127.0.0.2 not responding."


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_ends_all_ranks_also_those_that_joined(
    tmp_path: Path, signum: int
) -> None:
    ranks = program(
        tmp_path,
        "note(f'pid-{rank}', str(os.getpid()))\nif rank == 1: die()\ntime.sleep(300)\n",
    )
    with launcher(tmp_path, "-np", 2, "--min-np", 1, "--grace", 1, *ranks) as run:
        files = [tmp_path / name for name in ("pid-0", "pid--1")]
        wait_until(lambda: all(file.exists() for file in files), "rank 1 has joined")
        run.send_signal(signum)
        assert run.wait(DEADLINE_S) == 128 + signum
    wait_until_gone([int(file.read_text()) for file in files])


def test_nothing_of_a_failed_rank_is_left_when_it_starts_again(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "import subprocess\n"
        "if rank == 1:\n"
        "    ignore = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)'\n"
        '    ready = f\'; open({HERE!r} + "/ready", "w"); time.sleep(300)\'\n'
        "    child = subprocess.Popen([sys.executable, '-c', ignore + ready])\n"
        "    wait_for('ready'), note('child', str(child.pid)), die()\n"
        "if joins:\n"
        "    try: state = open('/proc/' + open(f'{HERE}/child').read() + '/stat').read()\n"
        "    except OSError: state = 'gone'\n"
        "    note('joined', state)\n"
        "wait_for('joined')\n",
    )
    succeeded("run", "-np", 2, "--min-np", 1, *ranks)
    # A container may have nobody who collects it.
    state = (tmp_path / "joined").read_text()
    assert state == "gone" or state.rpartition(")")[2].split()[0] == "Z"


def test_a_rank_that_fails_before_the_first_group_has_formed_is_in_it_when_it_starts_again(
    tmp_path: Path,
) -> None:
    ranks = program(
        tmp_path,
        "import gradring, numpy as np\n"
        "if rank == 1: sys.exit(3)\n"
        "with gradring.init() as comm: print(comm.world_size, comm.all_reduce(np.ones(1))[0])\n",
    )
    done = succeeded("run", "-np", 3, "--min-np", 2, *ranks)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 3 3.0" for rank in range(3)]


def test_ranks_start_on_hosts_that_the_script_finds(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "print(joins, attempt, flush=True)\n"
        "if joins: note('joined')\n"
        "else: note('list-1'), wait_for('joined')\n",
    )
    script = hosts_script(tmp_path, "localhost:2", "localhost:3")
    options = ["-np", 2, "--max-np", 4, "--host-discovery-script", script]
    done = succeeded("run", *options, *ranks)
    assert sorted(done.stdout.splitlines()) == ["[0] False 0", "[1] False 0", "[2] True 0"]
    assert "worker 2 is started on localhost, to join the others" in done.stderr


def test_a_job_goes_on_when_the_log_of_a_new_rank_cannot_be_opened(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ranks = program(
        tmp_path,
        f"import shutil\nlogs = {str(logs)!r}\n"
        "if rank == 0: shutil.rmtree(logs), open(logs, 'w').close(), note('list-1')\n"
        "if joins: note('joined')\n"
        "else: wait_for('joined')\n",
    )
    script = hosts_script(tmp_path, "localhost:1", "localhost:2")
    options = ["-np", 1, "--max-np", 2, "--host-discovery-script", script, "--log-dir", logs]
    done = succeeded("run", *options, *ranks)
    assert f"gradring run: rank 1 has no log: {logs}: File exists" in done.stderr


@ssh_stand_in.needs_addresses
def test_a_host_comes_and_another_goes(tmp_path: Path) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    ranks = program(
        tmp_path,
        "host = os.environ.get('SSH_HOST')\n"
        "def leave(*_): note(f'left-{host}'), sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "note(f'on-{host}', os.environ.get('GRADRING_JOIN', 'founds'))\n"
        "if rank == 0: wait_for('on-127.0.0.2'), note('list-1')\n"
        "if rank == 0: wait_for('on-127.0.0.3'), wait_for('left-127.0.0.2')\n"
        "else: wait_for('never') if host == '127.0.0.2' else None\n",
    )
    script = hosts_script(tmp_path, "localhost\nme@127.0.0.2", "localhost\nme@127.0.0.3")
    options = ["-np", 2, "--min-np", 1, "--max-np", 2, "--host-discovery-script", script]
    done = succeeded("run", *options, *ranks, env=ssh)
    assert (tmp_path / "on-127.0.0.2").read_text() == "founds"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", (tmp_path / "on-127.0.0.3").read_text())
    assert "worker 1 on 127.0.0.2 must leave within 10 s" in done.stderr
    assert "worker 1 on 127.0.0.2 has left (exit code 0)" in done.stderr
    assert "worker 1 is started on 127.0.0.3, to join the others" in done.stderr


@ssh_stand_in.needs_addresses
def test_a_rank_that_does_not_leave_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    ranks = program(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank == 1: note('list-1'), time.sleep(300)\n"
        "wait_until_said('has left')\n",
    )
    script = hosts_script(tmp_path, "localhost\nme@127.0.0.2", "localhost")
    options = ["-np", 2, "--min-np", 1, "--grace", 1, "--host-discovery-script", script]
    errors = errors_of(tmp_path, *options, *ranks, **ssh)
    assert "worker 1 on 127.0.0.2 has left (killed by SIGKILL)" in errors


@ssh_stand_in.needs_addresses
@pytest.mark.slow
def test_a_rank_moves_from_a_host_that_is_given_up(tmp_path: Path) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    ranks = program(
        tmp_path,
        "host = os.environ.get('SSH_HOST')\n"
        "if host == '127.0.0.2': sys.exit(3)\n"
        "if host == '127.0.0.3': note('moved')\n"
        "wait_for('moved')\n",
    )
    options = ["--hosts", "localhost,me@127.0.0.2,me@127.0.0.3", "-np", 2, "--min-np", 1]
    done = succeeded("run", *options, "--host-failures", 1, *ranks, env=ssh)
    assert "127.0.0.2 is given up after 1 failures in a row" in done.stderr
    assert "worker 1 is started on 127.0.0.3, to join the others" in done.stderr


@ssh_stand_in.needs_addresses
def test_a_host_that_cannot_be_reached_is_left_out_if_others_have_room(tmp_path: Path) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    ranks = program(tmp_path, "print(os.environ['GRADRING_WORLD_SIZE'])")
    options = ["--hosts", "localhost,me@127.0.0.2", "--min-np", 1, "--host-failures", 1]
    done = gradring("run", *options, *ranks, **ssh, SSH_STAND_IN_DOWN="127.0.0.2")
    assert done.returncode == 0 and done.stdout == "[0] 1\n"
    assert "No route to host" in done.stderr and "; it is given up" in done.stderr


def asked_again(directory: Path, then: str) -> tuple[Path, list[str]]:
    """A script that does something else once ranks run, and ranks that run until it often has."""
    script = executable(
        directory / "hosts.sh",
        f"#!/bin/sh\necho x >> {directory}/asked\n"
        f"if [ -e {directory}/begun ]; then {then}; fi\necho localhost:2\n",
    )
    ranks = program(
        directory,
        "note('begun')\n"
        "asked = os.stat(f'{HERE}/asked').st_size\n"
        "while os.stat(f'{HERE}/asked').st_size < asked + 6: time.sleep(0.05)\n",
    )
    return script, ranks


def test_a_script_that_fails_later_is_named_once_and_changes_nothing(tmp_path: Path) -> None:
    script, ranks = asked_again(tmp_path, "echo no such cluster >&2; exit 3")
    done = gradring("run", "-np", 2, "--host-discovery-script", script, *ranks)
    assert done.returncode == 0
    assert done.stderr == (
        f"gradring run: {script} ended with exit code 3 and said: no such cluster; the hosts that "
        "were known last count\n"
    )


@pytest.mark.slow  # a script that fails is quick
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("localhost:99999999999999999999", "write localhost:N with N of at least 1"),
        ("local\0host:2", "is not a host such as node-a:2"),
        ("localhost:99999999999999999", ""),
    ],
)
def test_no_line_of_a_script_ends_a_running_job(tmp_path: Path, line: str, said: str) -> None:
    """The hosts that were known last count; and no more ports are held than ranks may run."""
    second = tmp_path / "second"
    second.write_text(f"{line}\n")
    script, ranks = asked_again(tmp_path, f"cat {second}; exit")
    done = succeeded("run", "-np", 2, "--host-discovery-script", script, *ranks)
    assert said in done.stderr and ("known last count" in done.stderr) == bool(said)


@pytest.mark.slow
def test_a_script_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    vanishes = f"#!/bin/sh\nif [ -e {tmp_path}/begun ]; then rm $0; fi\necho localhost:2\n"
    script = executable(tmp_path / "hosts.sh", vanishes)
    ranks = program(tmp_path, "note('begun')\nwait_until_said('known last count')\n")
    errors_of(tmp_path, "-np", 2, "--host-discovery-script", script, *ranks)


def test_too_few_hosts_end_the_job_in_time(tmp_path: Path) -> None:
    script = hosts_script(tmp_path, "localhost")
    options = ["-np", 4, "--min-np", 2, "--host-discovery-script", script]
    done = gradring("run", *options, "true", GRADRING_TIMEOUT_S="2")
    assert done.returncode == 1
    assert "there is room for 1 workers, and the job needs 2; give more hosts" in done.stderr


def test_a_signal_ends_the_launcher_while_it_waits_for_hosts(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = f"#!/bin/sh\necho $$ > {pid}-\nmv {pid}- {pid}\nsleep 300\n"
    script = executable(tmp_path / "hosts.sh", hangs)
    with launcher(tmp_path, "-np", 2, "--host-discovery-script", script, "true") as run:
        wait_until(pid.exists, "the script runs")
        run.send_signal(signal.SIGTERM)
        assert run.wait(DEADLINE_S) == 128 + signal.SIGTERM
    wait_until_gone([int(pid.read_text())])


@pytest.mark.slow
def test_a_job_that_loses_a_machine_to_a_power_cut_trains_on_and_ends_well(tmp_path: Path) -> None:
    ranks = program(
        tmp_path,
        "import gradring, gradring.elastic, numpy as np\n"
        "with gradring.init() as comm:\n"
        "    if rank == 2: note('far-end', str(os.getppid()))\n"
        "    @gradring.elastic.run(comm)\n"
        "    def train(state):\n"
        "        while state.step < 20 or comm.world_size == 3:\n"
        "            ones = comm.all_reduce(np.ones(8))[0]\n"
        "            assert ones == comm.world_size\n"
        "            state.step += 1\n"
        "            state.commit()\n"
        "    train(gradring.elastic.State(step=0))\n"
        "    print('trained by', comm.world_size, flush=True)\n"
        "if rank == 0: note('done', str(os.getpid()))\n"
        "else: wait_until_gone('done'), note('noticed')\n",
    )
    with simulated_hosts(3) as hosts:
        first, *others = hosts
        names = json.dumps({host.address: host.name for host in others})
        variables = ssh_stand_in.install(tmp_path) | {
            "SSH_STAND_IN_HOSTS": names,
            "SSH_STAND_IN_NOTICES": str(tmp_path / "noticed"),
        }
        addresses = ",".join(host.address for host in hosts)
        words = map(str, command_line("run", "--hosts", addresses, "--min-np", 2, *ranks))
        with subprocess.Popen(
            first.command(*words),
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as run:
            wait_until((tmp_path / "far-end").exists, "the ranks train")
            others[-1].cut()
            os.kill(int((tmp_path / "far-end").read_text()), signal.SIGKILL)
            out, errors = run.communicate(timeout=2 * DEADLINE_S)
    assert run.returncode == 0, errors
    assert sorted(out.splitlines()) == ["[0] trained by 2", "[1] trained by 2"]
    assert errors.splitlines()[-1] == (
        "gradring run: the job has ended well without worker 2 on 10.99.0.3 (connection lost, ssh "
        "exit code 255)"
    )
