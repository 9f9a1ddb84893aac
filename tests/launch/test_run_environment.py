"""The variables that each rank is given."""

import json
import re
import signal
import socket
from pathlib import Path

import pytest
from launching import gradring, script

from gradring.clusters import detect
from gradring.config.settings import READ, Setting
from gradring.config.values import check_variables
from gradring.errors import ConfigError
from gradring.launch import ranks
from gradring.launch.ranks import KEPT_MEMORY, rank_environments, with_defaults
from gradring.machine.ports import free_ports


def test_our_variables_and_tf_config_agree() -> None:
    environments = rank_environments({"HOME": "/root"}, 3)
    for rank, environ in enumerate(environments):
        assert (detect(environ).rank, detect(environ).world_size) == (rank, 3)
        config = json.loads(environ["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": rank}
        assert config["cluster"]["worker"][0] == environ["GRADRING_RENDEZVOUS"]
        assert len(set(config["cluster"]["worker"])) == 3
    assert len({environ["GRADRING_RENDEZVOUS"] for environ in environments}) == 1


def test_the_token_is_random_and_shared() -> None:
    (first, second), (other,) = rank_environments({}, 2), rank_environments({}, 1)
    assert first["GRADRING_TOKEN"] == second["GRADRING_TOKEN"] != other["GRADRING_TOKEN"]
    assert len(first["GRADRING_TOKEN"]) == 64


def test_a_token_of_the_user_is_kept() -> None:
    (environ,) = rank_environments({"GRADRING_TOKEN": "mine"}, 1)
    assert environ["GRADRING_TOKEN"] == "mine"
    (environ,) = rank_environments({"GRADRING_TOKEN_FILE": "/a/file"}, 1)
    assert environ["GRADRING_TOKEN_FILE"] == "/a/file" and "GRADRING_TOKEN" not in environ


def test_the_token_is_not_on_any_command_line(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "token = os.environ['GRADRING_TOKEN'].encode()\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print(token in open(f'/proc/{pid}/cmdline', 'rb').read())\n",
    )
    assert gradring("run", "-np", 1, *program).stdout == "[0] False\n" * 2


def test_variables_of_other_launchers_are_not_inherited(tmp_path: Path) -> None:
    done = gradring(
        *("run", "-np", 2),
        *script(tmp_path, "from gradring.clusters import detect; print(detect().source)"),
        RANK="5",
        WORLD_SIZE="6",
        PMI_RANK="1",
        SLURM_STEP_ID="0",
        SLURM_NTASKS="9",
        TF_CONFIG="{",
    )
    assert sorted(done.stdout.splitlines()) == [f"[{r}] GRADRING_* variables" for r in (0, 1)]


def test_other_variables_are_inherited() -> None:
    inherited = {"GRADRING_TRANSPORT": "tcp", "GRADRING_STREAMS": "4", "SLURM_JOB_ID": "7"}
    (environ,) = rank_environments(inherited, 1)
    assert inherited.items() <= environ.items()


def test_a_rank_does_not_ignore_what_python_ignores_for_itself() -> None:
    # A writer whose reader has gone would else go on for ever.
    endless = "while :; do echo on; done | head -1; grep SigIgn /proc/self/status"
    done = gradring("run", "-np", 1, "bash", "-c", endless)
    first, ignored = done.stdout.splitlines()
    mask = int(ignored.split()[-1], 16)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not mask >> (signum - 1) & 1
    assert first == "[0] on" and done.stderr == ""


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"])
def test_cores_are_divided_among_the_ranks_unless_set(name: str) -> None:
    assert int(rank_environments({}, 1)[0][name]) >= int(rank_environments({}, 2)[0][name])
    assert rank_environments({}, 10_000 // 50)[0][name] == "1"
    assert rank_environments({name: "17"}, 2)[1][name] == "17"


@pytest.mark.parametrize(("quota", "each"), [(0.5, "1"), (3.9, "1"), (4.0, "2")])
def test_a_quota_of_cores_is_divided_too(
    monkeypatch: pytest.MonkeyPatch, quota: float, each: str
) -> None:
    monkeypatch.setattr(ranks, "cores", lambda: quota)
    assert rank_environments({}, 2)[0]["OMP_NUM_THREADS"] == each


@pytest.mark.parametrize("name", [*KEPT_MEMORY, "GLIBC_TUNABLES"])
def test_memory_of_a_step_is_kept_unless_the_user_says_how(name: str) -> None:
    assert KEPT_MEMORY.items() <= with_defaults({}, 1).items()
    found = with_defaults({name: "131072"}, 1)
    assert {n: v for n, v in found.items() if n in {name, *KEPT_MEMORY}} == {name: "131072"}


@pytest.mark.parametrize("proxy", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_is_not_asked_for_hosts_of_the_job(proxy: str) -> None:
    own = f"localhost,127.0.0.1,::1,{socket.gethostname()},node-a"
    found = with_defaults({proxy: "http://proxy:3128"}, 1, ["node-a", "localhost"])
    assert found["no_grpc_proxy"] == own
    # gRPC reads the first of them that is set.
    for name in ("no_proxy", "no_grpc_proxy"):
        given = {proxy: "http://proxy:3128", name: "example.org,node-a"}
        found = with_defaults(given, 1, ["node-a"])
        assert found["no_grpc_proxy"] == f"example.org,node-a,{own.removesuffix(',node-a')}"
    assert "no_grpc_proxy" not in with_defaults({}, 1, ["node-a"])


def test_the_launcher_keeps_the_memory_of_ranks_on_this_host(tmp_path: Path) -> None:
    program = script(tmp_path, f"print([os.environ[name] for name in {[*KEPT_MEMORY]}])\n")
    done = gradring("run", "-np", 1, *program)
    assert done.stdout == f"[0] {[*KEPT_MEMORY.values()]}\n", done.stderr


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize("options", [(), ("--min-np", "1")])
def test_no_other_job_takes_the_port_of_a_rank_that_does_not_listen_yet(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    text = """\
import errno, socket, gradring
port = int(os.environ.get("GRADRING_PORT") or os.environ["GRADRING_RENDEZVOUS"].split(":")[1])
with socket.socket() as other:
    print(other.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED)
with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", port))
    except OSError as error:
        print(error.errno == errno.EADDRINUSE)
gradring.init().close()
"""
    done = gradring("run", "-np", 1, *options, *script(tmp_path, text))
    assert done.stdout == "[0] True\n[0] True\n", done.stderr


#: Kinds of settings for which any text is a value, or the name of a file.
FREE = ("text", "directory", "file", "secret", "PEM file")


@pytest.mark.parametrize(
    "setting", [it for it in READ.values() if it.kind not in FREE], ids=lambda it: it.name
)
def test_a_wrong_value_of_a_setting_is_found_before_ranks_start(setting: Setting) -> None:
    with pytest.raises(ConfigError, match=f"^{setting.variable}="):
        check_variables({setting.variable: "?!"}, is_own=True)
    check_variables({setting.variable: " "}, is_own=True)


def test_what_only_another_host_can_judge_is_left_to_it() -> None:
    there = {"GRADRING_INTERFACE": "ib7", "GRADRING_TLS_CA": "/there", "GRADRING_TOKEN_FILE": "/x"}
    check_variables(there, is_own=False)
    for name, text in there.items():
        with pytest.raises(ConfigError, match=name):
            check_variables({name: text}, is_own=True)


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["-np", 2], {"GRADRING_TRANSPORT": "udp"}, "='udp' is not one of auto, tcp, shm; correct"),
        (["-np", 2, "--min-np", 1], {"GRADRING_TIMEOUT_S": "5m"}, "='5m' is not a number of s"),
        (["--hosts", "node-a", "-x", "GRADRING_STREAMS=99"], {}, "=99 is not a whole number fr"),
    ],
)
def test_a_wrong_setting_costs_a_line(
    words: list[object], variables: dict[str, str], said: str
) -> None:
    done = gradring("run", *words, "echo", "started", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gradring run: GRADRING_\w+=.*\n", done.stderr) and said in done.stderr


def test_variables_that_no_rank_gets_are_not_judged() -> None:
    done = gradring("run", "-np", 1, "echo", "started", GRADRING_RANK="x", GRADRING_JOIN="x")
    assert done.stdout == "[0] started\n", done.stderr
