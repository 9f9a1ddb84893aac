"""``gradring run --hosts``: ranks on other hosts, which are played by addresses of this one."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ssh_stand_in
from launching import (
    DEADLINE_S,
    executable,
    gradring,
    is_running,
    pids_noted,
    python_path,
    script,
    script_of_first,
    started,
    wait_until_gone,
)
from test_run_orphans import start

import gradring as gradring_package
from gradring.launch.hosts import Host, parse_hosts, place_ranks
from gradring.launch.ranks import KEPT_MEMORY
from gradring.launch.ssh import Ssh, forwarded
from gradring.launch.survey import SurveyError, ports_in, problem
from gradring.testing import simulated_hosts
from support.commands import command_line, head_of_script, succeeded
from support.waiting import wait_until

HOSTS = "me@127.0.0.2:2,me@127.0.0.3"

pytestmark = ssh_stand_in.needs_addresses


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    return ssh_stand_in.install(tmp_path)


@pytest.mark.slow
def test_parameter_servers_stand_on_the_hosts_in_turn(tmp_path: Path, ssh: dict[str, str]) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'updates')!r})\n"
        "from parameters import client, gradient, np, pulled, server\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "token = os.environ['GRADRING_TOKEN'].encode()\n"
        "addresses, task = config['cluster']['ps'], config['task']\n"
        "print(task['type'], task['index'], os.environ['SSH_HOST'], flush=True)\n"
        "if task['type'] == 'ps':\n"
        "    server(addresses, task['index'], 3, token=token, staleness=0).serve()\n"
        "    sys.exit()\n"
        "worker, weights = client(addresses, task['index'], token=token), np.zeros(8, np.float32)\n"
        "for _ in range(3):\n"
        "    pulled(worker, weights)\n"
        "    worker.push([gradient(task['index'])], 1.0)\n"
        "pulled(worker, weights)\n"
        "print([int(it) for it in weights[:4]])\n"
        "worker.leave()\n",
    )
    done = succeeded("run", "--hosts", HOSTS, "--ps", 2, sys.executable, program, env=ssh)
    lines = [line.split("] ", 1)[1] for line in done.stdout.splitlines()]
    assert {line for line in lines if line.startswith("ps")} == {"ps 0 127.0.0.2", "ps 1 127.0.0.3"}
    assert lines.count("[997, 997, 997, 1000]") == 3


def test_each_rank_gets_its_place_its_threads_and_tf_config(
    tmp_path: Path, ssh: dict[str, str]
) -> None:
    names = ["GRADRING_RANK", "GRADRING_RENDEZVOUS", "TF_CONFIG", "HERE_MINE", "HERE_GIVEN"]
    names += ["SSH_HOST", "PATH"]
    names += ["OMP_NUM_THREADS", "KERAS_BACKEND", "GRADRING_RESTART", *KEPT_MEMORY]
    program = script(
        tmp_path,
        "import json\n"
        f"names = {names}\n"
        "print(json.dumps([os.environ.get(name) for name in names]))\n"
        "print(json.dumps(os.getcwd()))\n",
    )
    given = {"HERE_MINE": "1", "KERAS_BACKEND": "tensorflow"}
    options = ["--hosts", HOSTS, "-x", "HERE_GIVEN=a b", "-x", "HERE_MINE"]
    done = succeeded("run", *options, *program, env=ssh | given)
    said = sorted(done.stdout.splitlines())
    addresses = None
    for rank in range(3):
        lines = [json.loads(line[4:]) for line in said if line.startswith(f"[{rank}] ")]
        (values,) = [line for line in lines if isinstance(line, list)]
        assert os.getcwd() in lines
        found = dict(zip(names, values, strict=True))
        config = json.loads(found["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": rank}
        addresses = addresses or config["cluster"]["worker"]
        assert config["cluster"]["worker"] == addresses
        assert found["GRADRING_RENDEZVOUS"] == addresses[0]
        assert found["GRADRING_RANK"] == str(rank)
        assert found["SSH_HOST"] == addresses[rank].rpartition(":")[0]
        assert found["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")
        assert found["HERE_MINE"] == "1" and found["HERE_GIVEN"] == "a b"
        assert found["KERAS_BACKEND"] == "tensorflow" and found["GRADRING_RESTART"] == "0"
        assert KEPT_MEMORY.items() <= found.items()
        local_size = 2 if rank < 2 else 1
        assert found["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // local_size))
    assert addresses is not None
    hosts = [address.rpartition(":")[0] for address in addresses]
    assert hosts == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
    assert len(set(addresses)) == 3


def test_what_ended_a_rank_on_another_host_is_relayed(tmp_path: Path, ssh: dict[str, str]) -> None:
    program = script_of_first(
        tmp_path,
        "import atexit, gradring\n"
        "if rank == 0: note_first()\n"
        "else: atexit.register(lambda: (until_first_was_collected(), time.sleep(1)))\n"
        "with gradring.init() as comm:\n"
        "    if rank == 1: sys.exit(7)\n"
        "    try: comm.barrier()\n"
        "    except gradring.errors.GradringError:\n"
        "        sys.stderr.write('it did not work')\n"
        "        sys.exit(1)\n",
    )
    done = gradring("run", "--hosts", "me@127.0.0.2:2", "--grace", 60, *program, **ssh)
    assert done.returncode == 7, done.stderr
    assert re.search(r"gradring run: rank 1 on \S+ failed first \(exit code 7\); ", done.stderr)
    assert "[0] it did not work\n" in done.stderr and "gradring failure" not in done.stderr


def test_the_token_is_on_no_command_line(tmp_path: Path, ssh: dict[str, str]) -> None:
    program = script(
        tmp_path,
        "from pathlib import Path\n"
        "token = os.environ['GRADRING_TOKEN'].encode()\n"
        "def read(path):\n"
        "    try: return path.read_bytes()\n"
        "    except OSError: return b''  # it has just ended\n"
        "seen = [p for p in Path('/proc').glob('[0-9]*/cmdline') if token in read(p)]\n"
        "print(len(token), seen)\n",
    )
    done = gradring("run", "--hosts", "me@127.0.0.2", *program, **ssh)
    assert done.stdout == "[0] 64 []\n", done.stderr
    notes = Path(ssh["SSH_STAND_IN_NOTES"]).read_text()
    assert "BatchMode=yes" in notes and "GRADRING" not in notes


def test_a_token_in_a_file_reaches_hosts_that_do_not_have_the_file(
    tmp_path: Path, ssh: dict[str, str]
) -> None:
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text("from a file\n")
    program = script(
        tmp_path, "print(os.environ['GRADRING_TOKEN'], 'GRADRING_TOKEN_FILE' in os.environ)"
    )
    token = {"GRADRING_TOKEN_FILE": str(tmp_path / "token")}
    done = gradring("run", "--hosts", "me@127.0.0.2", *program, **ssh, **token)
    assert done.stdout == "[0] from a file False\n", done.stderr


def test_one_timeline_has_the_ranks_of_all_hosts(tmp_path: Path, ssh: dict[str, str]) -> None:
    program = script(
        tmp_path,
        "import gradring, numpy as np\n"
        "for group in range(2):\n"
        "    with gradring.init() as comm:\n"
        "        for _ in range(5): assert comm.all_reduce(np.ones(3), name='w')[0] == 4.0\n",
    )
    trace = tmp_path / "timeline.json"
    options = ["--hosts", "localhost,me@127.0.0.2:2,me@127.0.0.3", "--trace", trace]
    done = succeeded("run", *options, *program, env=ssh)
    assert f"the timeline is {trace}; open it" in done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    called = [(e["pid"], e["args"]["sequence"]) for e in events if e["ph"] == "X" and "args" in e]
    # Those of the second group follow.
    assert sorted(called) == [(rank, sequence) for rank in range(8) for sequence in range(1, 6)]
    # Nothing stays behind, here or there.
    assert not trace.with_name("timeline.json.parts").exists()
    assert [list(far.iterdir()) for far in tmp_path.glob("tmp-*")] == [[], []]
    # No part travelled where a list of processes shows it, and each host was asked once.
    notes = Path(ssh["SSH_STAND_IN_NOTES"]).read_text()
    assert notes.count("gradring.launch.collect") == 2


@pytest.mark.slow
def test_a_host_that_is_gone_costs_its_part_of_the_timeline(
    tmp_path: Path, ssh: dict[str, str]
) -> None:
    # The ranks have started when the host goes.
    program = script(
        tmp_path,
        "import gradring\n"
        "with gradring.init() as comm: comm.barrier()\n"
        f"open({str(tmp_path / 'gone')!r}, 'w').write('127.0.0.3')\n",
    )
    trace = tmp_path / "timeline.json"
    options = ["--hosts", "me@127.0.0.2,me@127.0.0.3", "--trace", trace]
    gone = str(tmp_path / "gone")
    done = succeeded("run", *options, *program, env={**ssh, "SSH_STAND_IN_GONE": gone})
    assert "the timeline's parts on 127.0.0.3 cannot be had: ssh: connect to host" in done.stderr
    assert f"the timeline is {trace}, without rank 1; open it" in done.stderr


@pytest.mark.slow
def test_a_modules_exit_code_and_traceback_come_from_the_first_failing_rank(
    tmp_path: Path, ssh: dict[str, str]
) -> None:
    script(tmp_path, "if rank == 2: raise ValueError('no such layer')\ntime.sleep(300)\n")
    done = gradring(
        *("run", "--hosts", HOSTS, "--grace", 4, "-m", "train"),
        **ssh,
        PYTHONPATH=python_path(tmp_path),
    )
    assert done.returncode == 1
    assert "rank 2 on 127.0.0.3 failed first (exit code 1)" in done.stderr
    assert done.stderr.count("[2] ValueError: no such layer\n") == 1


@pytest.mark.slow
def test_a_killed_rank_is_reported_with_its_signal(tmp_path: Path, ssh: dict[str, str]) -> None:
    program = script(
        tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(300)\n"
    )
    done = gradring("run", "--hosts", HOSTS, "--grace", 2, *program, **ssh)
    assert done.returncode == 137
    assert "rank 1 on 127.0.0.2 failed first (killed by SIGKILL)" in done.stderr


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_no_remote_process_outlives_the_launcher(
    tmp_path: Path, ssh: dict[str, str], signum: int
) -> None:
    options = ["--hosts", "me@127.0.0.2,me@127.0.0.3", "--grace", "1"]
    with start(tmp_path, *options, **ssh) as launcher:
        pids = pids_noted(tmp_path, 2)
        assert all(map(is_running, pids))
        launcher.send_signal(signum)
        code = launcher.wait(DEADLINE_S)
    assert code == (-9 if signum == signal.SIGKILL else 128 + signum)
    wait_until_gone(pids)


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, ssh: dict[str, str]) -> None:
    program = script(tmp_path, "print('started')")
    done = gradring("run", "--hosts", HOSTS, *program, **ssh, SSH_STAND_IN_DOWN="127.0.0.3")
    assert done.returncode == 1 and done.stdout == ""
    assert "host me@127.0.0.3 cannot run ranks" in done.stderr and "No route to host" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_launcher_while_a_host_does_not_answer(
    tmp_path: Path, signum: int
) -> None:
    pid = tmp_path / "pid"
    hangs = f"#!/bin/sh\necho $$ > {pid}-\nmv {pid}- {pid}\nexec sleep 300\n"
    stand_in = executable(tmp_path / "bin" / "ssh", hangs)
    environ = {**os.environ, "PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"}
    with started("run", "--hosts", "me@127.0.0.2", "true", env=environ) as launcher:
        wait_until(pid.exists, "the host is asked")
        launcher.send_signal(signum)
        assert launcher.wait(DEADLINE_S / 2) == 128 + signum  # it would be asked for a minute
    wait_until_gone([int(pid.read_text())])


def test_a_host_may_greet_in_any_encoding(tmp_path: Path, ssh: dict[str, str]) -> None:
    stand_in, greeting = tmp_path / "bin" / "ssh", "Grüße\n".encode("latin-1")
    greets = f"import os\nfor stream in 1, 2: os.write(stream, {greeting!r})\n"
    rest = stand_in.read_text().removeprefix(head_of_script())
    stand_in.write_text(f"{head_of_script()}{greets}{rest}")
    run = command_line("run", "--hosts", "me@127.0.0.2", *script(tmp_path, "print('started')"))
    done = subprocess.run(run, env={**os.environ, **ssh}, capture_output=True, check=False)
    assert done.stdout == b"[0] " + greeting + b"[0] started\n", done.stderr


def test_a_host_whose_name_has_no_address_is_named(ssh: dict[str, str]) -> None:
    done = gradring("run", "--hosts", "127.0.0.1,no-host.invalid", "x", **ssh)
    assert done.returncode == 1
    assert "cannot be started" in done.stderr and ": no-host.invalid" in done.stderr


def test_a_host_without_gradring_is_named(ssh: dict[str, str]) -> None:
    done = gradring("run", "--hosts", "me@127.0.0.2", "--python", "/nonexistent/python", "x", **ssh)
    assert done.returncode == 1
    assert "host me@127.0.0.2" in done.stderr and "--python names another" in done.stderr


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        ("a, me@b:2", [Host("a", 1), Host("me@b", 2)]),
        ("[fd00::7]:2,fd00::8", [Host("fd00::7", 2), Host("fd00::8", 1)]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a:0", "a:x", "a,,b", "-oProxyCommand=x", "a b", "a:1,a:2"])
def test_malformed_hosts_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a host|ranks|named twice"):
        parse_hosts(text)


def test_ranks_fill_the_hosts_in_order() -> None:
    a, b = Host("a", 2), Host("b", 2)
    assert place_ranks([a, b], 3) == [a, a, b]
    with pytest.raises(ValueError, match="room for 4 ranks, not for 5"):
        place_ranks([a, b], 5)


def test_a_variable_that_is_to_travel_and_is_not_set_is_named(ssh: dict[str, str]) -> None:
    program = ["sh", "-c", "echo ${RATE-none} ${SEED-none}"]
    done = gradring("run", "--hosts", "me@127.0.0.2", "-x", "RATE", "-x", "SEED=1", *program, **ssh)
    assert (done.returncode, done.stdout) == (0, "[0] none 1\n")
    assert done.stderr.startswith("gradring run: -x RATE: this variable is not set here")


def test_only_some_variables_travel_unasked() -> None:
    environ = {"GRADRING_TIMEOUT_S": "5", "TF_X": "1", "SECRET": "s", "LANG": "C"}
    assert forwarded(environ, ["LANG", "NEW=1", "ABSENT"]) == {
        "GRADRING_TIMEOUT_S": "5",
        "TF_X": "1",
        "LANG": "C",
        "NEW": "1",
    }


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            subprocess.TimeoutExpired("ssh", 60.0),
            "host me@a did not answer within 60 s; try: ssh -p 7 me@a true",
        ),
        (
            subprocess.CalledProcessError(255, "ssh", "", "Welcome\nPermission denied\n"),
            "host me@a cannot run ranks: ssh ended with exit code 255 and said: Welcome | "
            "Permission denied (ssh must work without a password: ssh -p 7 me@a true; and "
            "/there/python must have gradring: --python names another interpreter)",
        ),
        (
            subprocess.CalledProcessError(1, "ssh", "", ""),
            "ssh ended with exit code 1 and said: nothing (ssh must work",
        ),
        (subprocess.CalledProcessError(-9, "ssh", "", ""), "ssh was killed by SIGKILL and said: n"),
        (OSError("no space"), "host me@a cannot run ranks: no space; try: ssh -p 7 me@a true"),
    ],
)
def test_what_a_host_answers_to_no_question_says_what_to_try(error: Exception, said: str) -> None:
    (host,), ssh = parse_hosts("me@a:2"), Ssh("/there/python", 7)
    assert said in problem(error, host, ssh)


def test_a_machine_without_ssh_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (host,) = parse_hosts("a")
    said = "there is no program 'ssh'; install an ssh client"
    assert problem(FileNotFoundError(2, "No such file"), host, Ssh()) == said


def test_a_host_with_another_gradring_or_a_greeting_alone_is_named() -> None:
    (host,) = parse_hosts("a")
    answer = {"version": gradring_package.__version__, "ports": [7, 65535]}
    assert ports_in(f"Welcome\n{json.dumps(answer)}\n", host) == [7, 65535]
    with pytest.raises(SurveyError, match=r"host a has gradring '0\.0', this one .*; install the"):
        ports_in(json.dumps({**answer, "version": "0.0"}), host)
    for other in ("[3]", '{"ports": [7]}', json.dumps({**answer, "ports": 7})):
        with pytest.raises(ValueError, match=r"it printed .*, which names no ports"):
            ports_in(other, host)


def names_of_this_machine() -> list[str]:
    """Its host name, and the addresses of its interfaces where ``ip`` tells them."""
    names = ["localhost", "127.0.0.1", "127.0.0.2", socket.gethostname()]
    if shutil.which("ip") is not None:
        done = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        found = [row[3].partition("/")[0] for row in rows if row[2] in ("inet", "inet6")]
        names += [address for address in found if not address.startswith("fe80:")]
    return names


def test_this_machine_is_known_by_each_of_its_names_and_addresses() -> None:
    for name in names_of_this_machine():
        assert Host(name, 1).is_local, name
        # The user may be another one.
        assert not Host(f"me@{name}", 1).is_local


@pytest.mark.parametrize("name", ["198.51.100.7", "2001:db8::1", "no-host.invalid", "a" * 70])
def test_other_machines_are_not_taken_for_this_one(name: str) -> None:
    assert not Host(name, 1).is_local


def test_ranks_on_addresses_of_this_machine_start_without_ssh(ssh: dict[str, str]) -> None:
    hosts = f"127.0.0.2:2,{socket.gethostname()}"
    command = ["sh", "-c", "echo ${SSH_HOST-here} $GRADRING_RENDEZVOUS $OMP_NUM_THREADS"]
    done = succeeded("run", "--hosts", hosts, *command, env=ssh)
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert len(done.stdout.splitlines()) == 3
    for line in done.stdout.splitlines():
        assert re.fullmatch(rf"\[\d\] here 127\.0\.0\.1:\d+ {threads}", line)
    assert not Path(ssh["SSH_STAND_IN_NOTES"]).exists()


def test_a_kernel_that_binds_to_any_address_makes_no_machine_this_one() -> None:
    program = (
        "from gradring.launch.hosts import Host\n"
        "names = '10.99.0.1', '127.0.0.2', '10.99.0.2', '198.51.100.7'\n"
        "print([Host(name, 1).is_local for name in names])"
    )
    with simulated_hosts(1) as (host,):
        bind_to_any = "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind"
        script = f'{bind_to_any} && exec "$0" -c "$1"'
        command = host.command("sh", "-c", script, sys.executable, program)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True, False, False]\n"


@pytest.mark.slow
@pytest.mark.parametrize("own", ["10.99.0.1", "127.0.0.1"])
def test_ranks_on_an_address_of_this_machine_meet_those_on_another(
    tmp_path: Path, ssh: dict[str, str], own: str
) -> None:
    program = script(
        tmp_path,
        "import gradring\n"
        "with gradring.init() as comm:\n"
        "    print(os.environ.get('SSH_HOST'), comm.all_reduce(1.0))\n"
        "    print(os.environ['GRADRING_RENDEZVOUS'].rpartition(':')[0])\n",
    )
    with simulated_hosts(2) as hosts:
        there = {"SSH_STAND_IN_HOSTS": json.dumps({hosts[1].address: hosts[1].name})}
        command = command_line("run", "--hosts", f"{own},{hosts[1].address}", *program)
        done = subprocess.run(
            hosts[0].command(*map(str, command)),
            env={**os.environ, **ssh, **there},
            capture_output=True,
            text=True,
        )
    assert sorted(done.stdout.splitlines()) == [
        "[0] 10.99.0.1",
        "[0] None 2.0",
        "[1] 10.99.0.1",
        "[1] 10.99.0.2 2.0",
    ], done.stderr
