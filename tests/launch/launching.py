"""Helpers of these tests: the command line, and looking for processes that it left behind."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradring.machine import resources
from support.commands import command_line, completed, head_of_script
from support.waiting import wait_until

DEADLINE_S = 60.0


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    return resources.group_if_running(pid) is not None


def pids_noted(directory: Path, ranks: int) -> list[int]:
    """The process ids that ``note_pids`` of so many ranks wrote, once all are there."""
    files = [directory / f"pids-{rank}" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files), "all ranks have started")
    return [int(pid) for file in files for pid in file.read_text().split()]


def wait_until_gone(pids: list[int], within_s: float = DEADLINE_S) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"{pids} have ended", within_s)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def gradring(*words: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command line to its end; keyword arguments are variables."""
    return completed(command_line(*words), env=variables, timeout=DEADLINE_S)


@contextlib.contextmanager
def started(*arguments: object, **given: Any) -> "Iterator[subprocess.Popen[Any]]":
    """The command line in the background, which a test that fails does not leave behind."""
    with subprocess.Popen(command_line(*arguments), **given) as process:
        try:
            yield process
        finally:
            process.kill()


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def hosts_script(directory: Path, *lists: str) -> Path:
    """Prints the first list of hosts; the next one when there is a file ``list-1`` and so on."""
    return executable(
        directory / "hosts.py",
        f"{head_of_script()}import os\n"
        f"known = [os.path.exists(f'{directory}/list-{{n}}') for n in range(1, {len(lists)})]\n"
        f"print({lists!r}[sum(known)])\n",
    )


def script(directory: Path, text: str) -> list[str]:
    """Writes a Python program for the ranks and returns the command that runs it."""
    path = directory / "train.py"
    head = "import os, signal, sys, time\nrank = int(os.environ['GRADRING_RANK'])\n"
    path.write_text(head + text)
    return [sys.executable, str(path)]


def python_path(directory: Path) -> str:
    """The variable with which modules of this directory are found, too."""
    return f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


#: For a program whose launcher is to say nothing of ranks that are alone.
IN_A_GROUP = "import gradring\nwith gradring.init() as comm:\n    comm.barrier()\n"


def script_of_first(directory: Path, text: str) -> list[str]:
    """A script in which one rank calls ``note_first``, and others wait until it was collected."""
    head = (
        f"first = {str(directory / 'first')!r}\n"
        "def note_first():\n"
        "    open(first + '-', 'w').write(str(os.getpid()))\n"
        "    os.rename(first + '-', first)\n"
        "def until_first_was_collected():\n"
        "    while not os.path.exists(first): time.sleep(0.01)\n"
        "    pid = int(open(first).read())\n"
        "    while os.path.exists(f'/proc/{pid}'): time.sleep(0.01)\n"
    )
    return script(directory, head + text)
