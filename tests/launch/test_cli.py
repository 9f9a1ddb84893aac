"""The command line around ``gradring run``."""

import subprocess
import sys

from launching import gradring


def test_no_command_prints_the_help_and_exits_with_2() -> None:
    done = gradring()
    assert done.returncode == 2
    assert "run " in done.stderr and "env " in done.stderr


def test_an_unknown_command_is_named_and_exits_with_2() -> None:
    done = gradring("fly")
    assert done.returncode == 2
    assert "there is no command 'fly'" in done.stderr and "usage: gradring" in done.stderr


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
