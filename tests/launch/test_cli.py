"""The command line around ``gradring run``."""

import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from launching import DEADLINE_S, gradring

from gradring.config.settings import SETTINGS
from gradring.launch.ssh import FORWARDED_PREFIXES
from gradring.tools import cli
from gradring.tools.cli import COMMANDS
from gradring.tools.cli.arguments import DOCUMENTATION
from gradring.tools.cli.run import EQUIVALENTS
from support.commands import command_line
from support.documents import ROOT


def test_no_command_prints_the_help_and_exits_with_2() -> None:
    done = gradring()
    assert done.returncode == 2
    assert "run " in done.stderr and "env " in done.stderr


def test_the_version_is_printed() -> None:
    done = gradring("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("gradring ")


def test_env_prints_the_cluster_and_the_reason() -> None:
    done = gradring(
        "env",
        GRADRING_RANK="1",
        GRADRING_WORLD_SIZE="2",
        GRADRING_RENDEZVOUS="127.0.0.1:29500",
        GRADRING_TOKEN="do-not-print",
    )
    assert done.returncode == 0
    rows = {line[:12].strip(): line[12:] for line in done.stdout.splitlines()}
    assert (rows["rank"], rows["world size"]) == ("1", "2")
    assert rows["found in"] == "GRADRING_* variables"
    assert rows["because"] == "GRADRING_RANK=1 and GRADRING_WORLD_SIZE=2 are set."
    assert rows["token"] == "set" and "do-not-print" not in done.stdout


@pytest.mark.parametrize(
    ("rank", "ports", "place"),
    [
        ("0", None, "127.0.0.1:29500"),
        ("1", None, "a free port"),
        ("1", "29501", "port 29501"),
        ("1", "29501-29509", "a free port from 29501 to 29509"),
    ],
)
def test_env_says_where_the_rank_would_listen(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    ports: str | None,
    place: str,
) -> None:
    place_of = {"RANK": rank, "WORLD_SIZE": "2", "RENDEZVOUS": "127.0.0.1:29500"}
    for name, value in {**place_of, **({"PORT": ports} if ports else {})}.items():
        monkeypatch.setenv(f"GRADRING_{name}", value)
    assert cli.main(["env"]) == 0
    assert re.search(f"^listens at +{place}$", capsys.readouterr().out, re.MULTILINE)


def test_env_explains_a_wrong_configuration_and_exits_with_2() -> None:
    done = gradring("env", GRADRING_RANK="1")
    assert done.returncode == 2
    assert done.stderr.startswith("gradring env: GRADRING_RANK is set but GRADRING_WORLD_SIZE is")


def test_the_run_command_does_not_import_the_other_commands() -> None:
    code = (
        "import sys, gradring.tools.cli as cli; cli.main(['run', '-np', '1', 'true']); "
        "unused = {'tensorflow', 'gradring.tools.cli.bench', 'gradring.tools.cli.demo'}; "
        "assert not unused & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_benchmark_for_each_rank_is_refused_with_what_to_type() -> None:
    done = gradring(
        *("bench", "all-reduce"),
        GRADRING_RANK="0",
        GRADRING_WORLD_SIZE="2",
        GRADRING_RENDEZVOUS="127.0.0.1:1",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "a benchmark starts its ranks itself" in done.stderr
    assert done.stderr.endswith("gradring bench all-reduce --world-size 2\n")


HELPED = [[name] for name in COMMANDS] + [["bench", "all-reduce"], ["bench", "link"]]


@pytest.mark.parametrize("command", [[], *HELPED], ids=" ".join)
def test_help_ends_with_an_example_and_the_address_of_the_documentation(
    command: list[str],
) -> None:
    done = gradring(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    example, _, address = done.stdout.partition("example:\n")[2].partition("documentation:\n")
    assert re.match(r"  gradring \w+", example)
    assert address.strip() == DOCUMENTATION


def test_the_help_of_run_has_groups_and_defaults() -> None:
    text = gradring("run", "--help").stdout
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert {"ranks and hosts", "failures and restarts", "elastic jobs"} <= set(titles)
    assert "(default 10)" in text
    # Where a text says nothing of it, it is added.
    assert "how they are reduced (default sum)" in gradring("bench", "all-reduce", "--help").stdout
    assert "between hosts, such as 20us (default 20us)" in gradring("simulate", "--help").stdout


def test_the_variables_that_travel_are_in_the_help_and_on_the_page() -> None:
    words = " ".join(gradring("run", "--help").stdout.split())
    page = (ROOT / "docs" / "clusters.md").read_text()
    for prefix in FORWARDED_PREFIXES:
        assert f" {prefix}*" in words and f"`{prefix}*`" in page


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("-np 0 true", "'0' is not a number of ranks"),
        ("-np 2 --grace -1 true", "'-1' is not a number of seconds"),
        ("-np 2 --max-restarts -1 true", "'-1' is not a number of restarts"),
        ("-np 2", "there is no command"),
        ("-np 2 -m", "there is no command"),
        ("true", "the number of ranks is missing; give -np N"),
        ("true -np 2", "-np is behind the command"),
        # Where the ranks run.
        ("-np 2 --hosts a:1 true", "-np 2 is more than the 1 rank of --hosts"),
        ("--hosts a:x true", "'a:x' has 'x' ranks"),
        ("--hosts a:3000 true", "3000 ranks are too many; a group has at most 2048"),
        ("--hostfile none true", "--hostfile: 'none' cannot be read (No such file or directory)"),
        ("--hostfile /dev/null true", "--hostfile: '/dev/null' names no host"),
        ("--hosts a --hostfile /proc/sys/kernel/hostname x", "not allowed with argument --hosts"),
        ("--hosts a --ssh-port 0 true", "port=0 is not a whole number from 1 to 65535"),
        ("--hosts a --ssh-identity-file missing true", "there is no file 'missing'"),
        ("--hosts a --ssh-identity-file ~noone/x true", "there is no file '~noone/x'"),
        # Elastic jobs, and parameter servers.
        ("-np 2 --min-np 3 true", "--min-np 3, -np 2 and --max-np 2 must grow"),
        ("-np 2 --max-np 1 true", "--min-np 2, -np 2 and --max-np 1 must grow"),
        ("--min-np 2 true", "give -np N"),
        ("-np 2 --host-discovery-script none true", "there is no file 'none'"),
        (f"-np 2 --host-discovery-script {'x' * 300} true", f"there is no file '{'x' * 300}'"),
        ("-np 2 --host-failures 5 true", "--host-failures is for an elastic job; give --min-np"),
        ("-np 2 --host-cooldown 5 true", "--host-cooldown is for an elastic job; give --min-np"),
        ("-np 2 --ps 1 --min-np 1 true", "--ps goes without --min-np"),
        ("-np 2 --ps 1 --max-np 4 true", "--ps goes without --min-np"),
        # Input and output.
        ("-np 2 --input-unprotected true", "--input-unprotected is for --input-workers K; give"),
        ("--input-workers 2 --hosts localhost,b true", "there may be processes on other hosts"),
        ("-np 2 --stdin 2 true", "--stdin 2: ranks run from 0 to 1"),
        ("-np 2 --output-rank 0,2 true", "--output-rank 2: ranks run from 0 to 1"),
        ("-np 2 --output-rank 0,x true", "'x' is no rank; give a number such as 0"),
        ("-np 1 --stdin -1 true", "'-1' is no rank"),
        ("--hosts here-not:1 --stdin 0 true", "rank 0 runs on here-not, and only a rank on"),
        ("-np 1 --max-np 2 --stdin 0 true", "--stdin goes without --min-np, --max-np and"),
    ],
    ids=lambda text: text[:40],
)
def test_wrong_usage_of_run_is_explained(options: str, problem: str) -> None:
    done = gradring("run", *options.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr


def test_equivalents_of_other_launchers_name_options_that_there_are() -> None:
    done = gradring("run", "--help")
    for ours, theirs in EQUIVALENTS.items():
        assert re.search(rf"^  .*{ours}\b", done.stdout, re.MULTILINE)
        assert not any(re.search(rf"[ ,]{option}\b(?!-)", done.stdout) for option in theirs)


def test_hosts_are_named_as_for_horovodrun_and_mpirun_too() -> None:
    done = gradring("run", "-np", 2, "-H", "localhost:2", "echo", "here")
    assert sorted(done.stdout.splitlines()) == ["[0] here", "[1] here"], done.stderr


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["run", "-pn", "2", "x"], "unrecognized arguments: -pn; did you mean -np?"),
        (["run", "--np", "2", "x"], "unrecognized arguments: --np; did you mean -np?"),
        (["run", "--max-restart", "1", "x"], ": --max-restart; did you mean --max-restarts?"),
        (["fly"], "there is no command 'fly'"),
        (["ruun"], "there is no command 'ruun'; did you mean run?"),
        (["--verion"], "unrecognized arguments: --verion; did you mean --version?"),
        (["bench", "allreduce"], "there is no 'allreduce'; did you mean all-reduce?"),
        (["bench", "all-reduce", "--size", "4"], "did you mean --sizes?"),
        (["bench", "all-reduce", "--op", "summ"], "there is no 'summ'; did you mean sum?"),
        (["run", "--nproc-per-node", "2", "x"], ": --nproc-per-node; did you mean -np?"),
        (["run", "--nproc_per_node=2", "x"], ": --nproc_per_node=2; did you mean -np?"),
        (["run", "--num_processes", "2", "x"], ": --num_processes; did you mean -np?"),
        (["run", "--num-proc", "2", "x"], ": --num-proc; did you mean -np?"),
        (["run", "--nnodes", "2", "x"], ": --nnodes; did you mean --hosts?"),
        (["run", "--machinefile", "h", "x"], ": --machinefile; did you mean --hostfile?"),
        (["run", "-np", "2", "--zzz", "x"], "unrecognized arguments: --zzz (gradring run --help)"),
    ],
)
def test_wrong_usage_is_two_lines_with_the_nearest_right_word(
    command: list[str], problem: str
) -> None:
    done = gradring(*command)
    assert (done.returncode, done.stdout) == (2, "")
    usage, error = done.stderr.splitlines()
    assert usage.startswith("usage: gradring") and len(usage) < 80
    assert command[0] != "run" or usage.startswith("usage: gradring run [-np N]")
    assert problem in error


#: Commands that write to standard output, and what a rank or a file is not needed for.
WRITING = [
    ["--version"],
    ["doctor", "--help"],
    ["env"],
    ["doctor", "127.0.0.1:1"],
    ["simulate", "--world-size", "2..8"],
    ["bench", "link"],
    ["bench", "all-reduce", "--sizes", "4"],
    ["demo"],
]
#: What PYTHONUNBUFFERED is; Python takes an empty variable for none.
BUFFERING = ["", "1"]


def with_output(
    target: IO[bytes], *words: str, unbuffered: str, stream: str = "stdout", **given: Any
) -> tuple[int, bytes, bytes]:
    """The exit code, and what arrived at the stream that is not ``target``."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: target}
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = command_line(*words)
    done = subprocess.run(command, env=environ, timeout=DEADLINE_S, **streams, **given)
    return done.returncode, done.stdout or b"", done.stderr or b""


@pytest.mark.parametrize("unbuffered", BUFFERING)
@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_reader_that_goes_away_is_no_error(
    command: list[str], unbuffered: str, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = with_output(gone, *command, unbuffered=unbuffered, cwd=tmp_path)
    assert done == (128 + signal.SIGPIPE, b"", b"")


NO_SPACE = b"gradring: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("unbuffered", BUFFERING)
@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_full_disk_is_told_in_one_line(
    command: list[str], unbuffered: str, tmp_path: Path
) -> None:
    with open("/dev/full", "wb") as full:
        done = with_output(full, *command, unbuffered=unbuffered, cwd=tmp_path)
    assert done == (1, b"", NO_SPACE)


def test_a_full_disk_under_a_file_is_told_in_one_line() -> None:
    done = gradring("simulate", "--world-size", "2", "--sizes", "4", "--json", "/dev/full")
    assert (done.returncode, done.stderr) == (1, NO_SPACE.decode())


@pytest.mark.parametrize("unbuffered", BUFFERING)
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["no-command"], 2),
        (["run", "-np", "2"], 2),
        (["explain", "/no/directory"], 2),
        (["run", "-np", "2", "no-program"], 127),
    ],
)
def test_an_error_that_cannot_be_written_keeps_its_exit_code(
    command: list[str], code: int, unbuffered: str
) -> None:
    with open("/dev/full", "wb") as full:
        done = with_output(full, *command, unbuffered=unbuffered, stream="stderr")
    assert done == (code, b"", b"")


@pytest.mark.parametrize("closed", [1, 2])
@pytest.mark.parametrize("command", [["run", "-np", "1", "echo", "x"], ["env"]])
def test_a_closed_stream_is_no_error(command: list[str], closed: int) -> None:
    close = f"import os, sys; os.close({closed}); os.execv(sys.argv[1], sys.argv[1:])"
    line = [sys.executable, "-c", close, *command_line(*command)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_env_shows_all_settings_where_they_are_from_and_what_nothing_reads() -> None:
    done = gradring(
        "env",
        GRADRING_STREAMS="2",
        GRADRING_TOKEN="do-not-print",
        GRADRING_TIMOUT_S="3",
        GRADRING_TOKENN="nor-this",
        GRADRING_OF_ANOTHER_PROGRAM="1",
    )
    rows = [re.split(r"  +", line) for line in done.stdout.partition("variable ")[2].splitlines()]
    shown = {row[0]: row[1:] for row in rows[1:]}
    assert {setting.variable for setting in SETTINGS} <= set(shown)
    assert shown["GRADRING_STREAMS"] == ["2", "environment"]
    assert shown["GRADRING_STALL_TIMEOUT_S"] == ["1800", "default"]
    assert shown["GRADRING_RANK"] == ["-", "not set"]
    assert shown["GRADRING_TOKEN"] == ["(secret)", "environment"]
    unknown = "environment, but nothing reads it"
    assert shown["GRADRING_OF_ANOTHER_PROGRAM"] == ["(set)", unknown]
    nothing = f"{unknown}; did you mean"
    assert shown["GRADRING_TIMOUT_S"] == ["(set)", f"{nothing} GRADRING_TIMEOUT_S?"]
    assert shown["GRADRING_TOKENN"] == ["(set)", f"{nothing} GRADRING_TOKEN?"]
    assert "do-not-print" not in done.stdout and "nor-this" not in done.stdout


def test_env_shows_the_settings_of_a_wrong_configuration_too() -> None:
    done = gradring("env", GRADRING_STREAMS="99")
    assert done.returncode == 2
    assert re.search(r"^GRADRING_STREAMS +99 +environment$", done.stdout, re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("argcomplete") is None, reason="it completes")
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("gradring do", "doctor"),
        ("gradring run --std", "--stdin"),
        ("gradring demo --update dil", "diloco"),
        ("gradring bench all-reduce --algorithm hie", "hierarchical"),
        ("gradring bench all-reduce --transport tcp,s", "tcp,shm"),
        ("gradring simulate --algorithm ring,hie", "ring,hierarchical"),
    ],
)
def test_a_shell_completes_commands_options_and_values(
    line: str, wanted: str, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    done = gradring(
        _ARGCOMPLETE="1",
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
        _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
    )
    assert done.returncode == 0, done.stderr
    assert wanted in answer.read_text()


def test_ctrl_c_is_told_in_one_line_and_other_errors_of_the_system_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    def broken(_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("gradring.tools.cli.env.run", interrupted)
    try:
        assert cli.main(["env"]) == 128 + signal.SIGINT
    except KeyboardInterrupt:  # it would end all tests
        pytest.fail("an interruption is no error of the command line")
    assert capsys.readouterr().err == "gradring env: interrupted\n"
    monkeypatch.setattr("gradring.tools.cli.env.run", broken)
    with pytest.raises(OSError, match="Input/output error"):
        cli.main(["env"])


def test_a_script_of_hosts_that_cannot_be_executed_is_told_how_it_could_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "my hosts"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--min-np", "1", "--host-discovery-script", str(script), "true"])
    assert ended.value.code == 2
    said = f"'{script}' cannot be executed; type: chmod +x '{script}'"
    assert said in capsys.readouterr().err
