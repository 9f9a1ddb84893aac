"""``gradring run --ps``: servers beside the ranks, and who goes on without whom."""

import json
import sys
from pathlib import Path

from launching import gradring

from support.commands import succeeded

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
cluster, task, index = config["cluster"], config["task"]["type"], config["task"]["index"]
attempt = int(os.environ["GRADRING_RESTART"])
def until(name):
    while not Path(name).exists(): time.sleep(0.01)
"""


def program(directory: Path, text: str) -> list[str]:
    """A program that gets the directory as its working directory."""
    path = directory / "train.py"
    path.write_text(f"{HEAD}os.chdir({str(directory)!r})\n{text}")
    return [sys.executable, str(path)]


def test_servers_know_their_place_and_are_no_ranks(tmp_path: Path) -> None:
    run = program(
        tmp_path,
        "print(json.dumps([task, index, cluster, os.environ.get('GRADRING_RANK'),\n"
        "                  os.environ['GRADRING_JOB_ID'], os.environ['GRADRING_TOKEN']]))\n",
    )
    ended = succeeded("run", "-np", 2, "--ps", 2, "--log-dir", tmp_path / "logs", *run)
    lines = dict(line.split("] ", 1) for line in ended.stdout.splitlines())
    assert sorted(lines) == ["[0", "[1", "[ps 0", "[ps 1"]
    found = {name.removeprefix("["): json.loads(said) for name, said in lines.items()}
    assert [found["ps 1"][:2], found["1"][:2]] == [["ps", 1], ["worker", 1]]
    assert [each[3] for _, each in sorted(found.items())] == ["0", "1", None, None]
    assert all(each[2] == found["0"][2] for each in found.values())
    addresses = [*found["0"][2]["worker"], *found["0"][2]["ps"]]
    assert len(set(addresses)) == 4
    assert len({tuple(each[4:]) for each in found.values()}) == 1
    logs = {file.name for file in (tmp_path / "logs").glob("*.log")}
    assert logs == {"rank-0.log", "rank-1.log", "ps-0.log", "ps-1.log"}


def test_a_lost_rank_ends_nobody_and_is_named(tmp_path: Path) -> None:
    run = program(
        tmp_path,
        "if (task, index) == ('worker', 0):\n"
        "    Path('pid-').write_text(str(os.getpid())); os.rename('pid-', 'pid')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "until('pid')\n"
        "while Path('/proc', Path('pid').read_text()).exists(): time.sleep(0.01)\n",
    )
    ended = succeeded("run", "-np", 2, "--ps", 1, "--grace", 0.1, *run)
    assert "rank 0 on " in ended.stderr
    assert "failed (killed by SIGKILL); the others continue without it" in ended.stderr


def test_a_lost_server_starts_again_as_often_as_is_allowed(tmp_path: Path) -> None:
    run = program(
        tmp_path,
        "if task == 'ps':\n"
        "    if attempt < 2: sys.exit(3)\n"
        "    Path('served').touch()\n"
        "until('served')\n",
    )
    ended = succeeded("run", "-np", 1, "--ps", 1, "--max-restarts", 2, *run)
    assert "failed (exit code 3); it is started again (restart 2/2)" in ended.stderr


def test_without_a_server_the_job_fails_and_names_it(tmp_path: Path) -> None:
    run = program(tmp_path, "until('never') if task == 'worker' else sys.exit('no disk')\n")
    ended = gradring("run", "-np", 2, "--ps", 1, "--grace", 0.2, *run)
    assert ended.returncode == 1
    assert (
        "ps 0 has ended (exit code 1); 2 processes still running must end within 0.2 s"
        in ended.stderr
    )
    assert "failed first (exit code 1)" in ended.stderr
    assert ended.stderr.count("[ps 0] no disk\n") == 1


def test_when_all_ranks_have_failed_so_has_the_job_and_servers_end(tmp_path: Path) -> None:
    run = program(tmp_path, "sys.exit('no data') if task == 'worker' else until('never')\n")
    ended = gradring("run", "-np", 2, "--ps", 1, "--grace", 0.2, *run)
    assert ended.returncode == 1
    assert "] no data\n" in ended.stderr and "[ps 0]" not in ended.stderr


def test_servers_that_do_not_notice_the_end_are_ended(tmp_path: Path) -> None:
    run = program(tmp_path, "if task == 'ps': until('never')\n")
    succeeded("run", "-np", 2, "--ps", 1, "--grace", 0.2, *run)


def test_workers_that_form_no_group_have_no_timeline_and_the_launcher_says_why(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "timeline.json"
    ended = succeeded("run", "-np", 2, "--ps", 1, "--trace", trace, *program(tmp_path, ""))
    said = f"there is no timeline {trace}: workers of parameter servers form no group"
    assert said in ended.stderr
