"""The file of ``gradring run --hostfile``, and the choice between it and ``--hosts``."""

import json
import subprocess
from pathlib import Path

import pytest
from launching import gradring

from gradring import __version__
from gradring.launch.hostfile import read_hosts
from gradring.launch.hosts import Host
from gradring.launch.ssh import Ssh
from gradring.launch.survey import ports_in
from support.commands import command_line


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=2\nb slots = 3\n", [Host("a", 2), Host("b", 3)]),
        ("a:2\nb\n", [Host("a", 2), Host("b", 1)]),
        ("\n# all of them\n\n  a slots=2  # two\r\n\t\r\n#b\n", [Host("a", 2)]),
        ("[fd00::7]:2\nfd00::8 slots=3\n[fd00::9]", [Host("fd00::7", 2), Host("fd00::8", 3)]),
        ("me@a:2 port=2222\n", [Host("me@a", 2, 2222)]),
        ("a slots=4 max_slots=8 username=me port=22", [Host("me@a", 4, 22)]),
        ("fd00::7 username=me max-slots=4", [Host("me@fd00::7", 1)]),
        # A line for each slot, as PBS writes them.
        ("a\na\nb\na\nb slots=2\n", [Host("a", 3), Host("b", 3)]),
        ("\ufeffa:2", [Host("a", 2)]),
    ],
)
def test_the_formats_of_other_launchers_are_read(
    tmp_path: Path, text: str, hosts: list[Host]
) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(text.encode())
    assert read_hosts(file)[: len(hosts)] == hosts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no host; write a line such as node-a slots=2"),
        ("# nobody\n", "names no host"),
        ("a\nb slots=0\n", "line 2 of .*: 'b' has '0' ranks"),
        ("a slots=x", "'a' has 'x' ranks"),
        ("a:99999999999999999999", "ranks; write a:N with N of at least 1"),
        ("a slots=" + "9" * 5000, r"'9{79}\.\.\. ranks; write a:N"),
        ("a\0b:2", r"'a\\x00b:2' is not a host"),
        ("a\x1b[2J:2", "is not a host"),
        ("a slots=", "'slots=' is not one of slots=, max_slots=, port=, username="),
        ("a gpus=2", "'gpus=2' is not one of"),
        ("a 2", "'2' is not one of"),
        ("a:2 slots=2", "'a:2' has its number of ranks twice"),
        ("a slots=2 slots=3", "says one thing twice"),
        ("me@a username=you", "'me@a' has its user twice"),
        ("a port=70000", "port=70000 is not a whole number from 1 to 65535"),
        ("a\nme@a\n", "line 2 of .*: 'a' is named twice, with another user or port"),
        ("a port=22\na port=23\n", "named twice"),
        ("slots=2", "'slots=2' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("[fd00::7", "is not a host"),
        ("[fd00::7]2", "is not a host"),
        ("a,b", "is not a host"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_hosts(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing' cannot be read \(No such file or directory\)"):
        read_hosts(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ValueError, match="binary' is no text"):
        read_hosts(tmp_path / "binary")


def test_ranks_fill_the_hosts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my hosts"
    file.write_text("localhost slots=3\n")
    said = ["sh", "-c", "echo $GRADRING_RANK of $GRADRING_WORLD_SIZE"]
    done = gradring("run", "--hostfile", file, *said)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} of 3" for rank in range(3)]
    done = gradring("run", "-np", 1, "--hostfile", file, *said)
    assert done.stdout == "[0] 0 of 1\n"
    done = gradring("run", "-np", 4, "--hostfile", file, *said)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gradring run: -np 4 is more than the 3 ranks of --hostfile\n"


def test_a_file_can_be_a_pipe() -> None:
    command = command_line("run", "--hostfile", "/dev/stdin", "echo", "here")
    done = subprocess.run(command, input="localhost:2\n", capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == ["[0] here", "[1] here"], done.stderr


def test_options_of_the_user_come_before_ours_and_a_hosts_own_port_first() -> None:
    ssh = Ssh("/opt/my env/bin/python", 2222, ("-o", "ConnectTimeout=3", "-i", "/a key"))
    words = ssh.command(Host("me@a", 2), "gradring.launch.survey", "2")
    assert words[:7] == ["ssh", "-p", "2222", "-o", "ConnectTimeout=3", "-i", "/a key"]
    assert words.index("ConnectTimeout=3") < words.index("ConnectTimeout=15")
    assert words[-2:] == ["me@a", "'/opt/my env/bin/python' -m gradring.launch.survey 2"]
    assert ssh.trial(Host("a", 1, 23)) == "ssh -p 23 -o ConnectTimeout=3 -i '/a key' a true"
    assert Ssh().trial(Host("a", 1)) == "ssh a true"


@pytest.mark.parametrize(
    "printed", ["", "bye", "[]", '{"ports": [1]}', '{"version": "x", "ports": 5}', "hello\n17"]
)
def test_what_is_no_answer_of_a_host_is_shown(printed: str) -> None:
    with pytest.raises(ValueError, match=r"it printed .*, which names no ports"):
        ports_in(printed, Host("a", 1))


@pytest.mark.parametrize("port", [0, 65536, "1", None, True])
def test_what_is_no_port_is_a_typed_error(port: object) -> None:
    answer = {"version": __version__, "ports": [port]}
    with pytest.raises(ValueError, match="a port="):
        ports_in(json.dumps(answer), Host("a", 1))
