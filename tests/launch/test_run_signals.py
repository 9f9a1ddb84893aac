"""Signals to ``gradring run`` that end no job: notices of batch systems, and Ctrl-Z."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_stand_in
from launching import DEADLINE_S, pids_noted, script, started

from support.commands import command_line
from support.waiting import wait_until

LISTENS = """
heard = []
for name in "SIGUSR1", "SIGUSR2", "SIGCONT":
    signal.signal(getattr(signal, name), lambda signum, _: heard.append(signum))
with open(f"{HERE}/pids-{rank}-", "w") as file: file.write(f"{os.getpid()}")
os.rename(f"{HERE}/pids-{rank}-", f"{HERE}/pids-{rank}")
while awaited.difference(heard): time.sleep(0.01)
print("heard", sorted(awaited), flush=True)
"""


def listeners(directory: Path, *awaited: int) -> list[str]:
    """A program that ends well when each of its ranks has heard these signals."""
    head = f"HERE, awaited = {str(directory)!r}, {set(map(int, awaited))}\n"
    return script(directory, head + LISTENS)


@contextlib.contextmanager
def running(
    directory: Path, ranks: int, *words: object, **variables: str
) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A launcher with so many `listeners`, which are ready; also their process ids."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environ = {**os.environ, **variables}
    with started("run", *words, env=environ, start_new_session=True, **streams) as launcher:
        yield launcher, pids_noted(directory, ranks)


def state(pid: int) -> str:
    """Of a process: ``T`` where it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@ssh_stand_in.needs_addresses
@pytest.mark.parametrize("hosts", ["localhost:2", "localhost,me@127.0.0.2"])
def test_notices_reach_the_ranks_and_end_nothing(tmp_path: Path, hosts: str) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    program = listeners(tmp_path, signal.SIGUSR1, signal.SIGUSR2)
    with running(tmp_path, 2, "--hosts", hosts, *program, **ssh) as (launcher, _):
        launcher.send_signal(signal.SIGUSR1)
        launcher.send_signal(signal.SIGUSR2)
        out, errors = launcher.communicate(timeout=DEADLINE_S)
    said = f"heard {sorted(map(int, (signal.SIGUSR1, signal.SIGUSR2)))}"
    assert sorted(out.splitlines()) == [f"[0] {said}", f"[1] {said}"], errors
    assert launcher.returncode == 0 and "to end" not in errors


def test_a_notice_does_not_end_the_wait_for_a_restart(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "if os.environ['GRADRING_RESTART'] == '0': sys.exit(3)\nprint('again')\n",
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started("run", "-np", 1, "--max-restarts", 1, *program, **streams) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if "starts all ranks again" in line:
                break
        launcher.send_signal(signal.SIGUSR1)
        out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert (launcher.returncode, out) == (0, "[0] again\n")


@ssh_stand_in.needs_addresses
@pytest.mark.parametrize("hosts", ["localhost:2", "localhost,me@127.0.0.2"])
def test_a_suspended_launcher_suspends_its_ranks(tmp_path: Path, hosts: str) -> None:
    ssh = ssh_stand_in.install(tmp_path)
    program = listeners(tmp_path, signal.SIGCONT)
    with running(tmp_path, 2, "--hosts", hosts, *program, **ssh) as (launcher, pids):
        launcher.send_signal(signal.SIGTSTP)
        all_pids = [launcher.pid, *pids]
        wait_until(lambda: all(state(pid) == "T" for pid in all_pids), "all are stopped")
        launcher.send_signal(signal.SIGCONT)
        out, errors = launcher.communicate(timeout=DEADLINE_S)
    assert (launcher.returncode, len(out.splitlines())) == (0, 2), errors


def test_ctrl_z_at_a_terminal_stops_a_job_that_the_shell_continues(tmp_path: Path) -> None:
    """The shell of a session of its own, as that of a terminal window."""
    program = listeners(tmp_path, signal.SIGCONT)
    words = " ".join(f"'{word}'" for word in command_line("run", "-np", 2, *program))
    shell, terminal = pty.fork()
    if shell == 0:
        os.execvp("bash", ["bash", "--norc", "-i"])
    try:
        os.write(terminal, f"{words}\n".encode())
        pids = pids_noted(tmp_path, 2)
        os.write(terminal, b"\x1a")
        wait_until(lambda: all(state(pid) == "T" for pid in pids), "both ranks are stopped")
        os.write(terminal, b"fg\nexit\n")
        printed = b"".join(iter(lambda: read(terminal), b""))
        assert printed.count(f"heard [{int(signal.SIGCONT)}]".encode()) == 2, printed
    finally:
        os.kill(shell, signal.SIGKILL)
        os.waitpid(shell, 0)
        os.close(terminal)


def read(terminal: int) -> bytes:
    """What a terminal shows next; nothing once its processes have ended."""
    try:
        ready, _, _ = select.select([terminal], [], [], DEADLINE_S)
        return os.read(terminal, 1 << 16) if ready else b""
    except OSError:
        return b""


def test_a_terminal_without_a_shell_suspends_nothing(tmp_path: Path) -> None:
    """As of ``ssh -t host gradring run``: nobody could continue the job."""
    program = listeners(tmp_path, signal.SIGCONT)
    launcher, terminal = pty.fork()
    if launcher == 0:
        os.execvp(sys.executable, command_line("run", "-np", 1, *program))
    try:
        pids_noted(tmp_path, 1)
        os.write(terminal, b"\x1a")
        printed = b"".join(iter(lambda: read(terminal), b""))
        assert f"heard [{int(signal.SIGCONT)}]".encode() in printed
    finally:
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
        os.close(terminal)


@pytest.mark.slow
def test_a_job_suspended_for_longer_than_silence_trains_on(
    tmp_path: Path,
) -> None:
    program = script(
        tmp_path,
        f"HERE = {str(tmp_path)!r}\n"
        "import gradring, numpy as np\n"
        "with gradring.init() as comm:\n"
        "    with open(f'{HERE}/pids-{rank}-', 'w') as file: file.write(f'{os.getpid()}')\n"
        "    os.rename(f'{HERE}/pids-{rank}-', f'{HERE}/pids-{rank}')\n"
        "    resumed = np.zeros(1)\n"
        "    def on_resume(*_): resumed[0] = 1\n"
        "    signal.signal(signal.SIGCONT, on_resume)\n"
        "    while comm.all_reduce(resumed.copy())[0] < 3: time.sleep(0.01)\n"
        "print('trained', flush=True)\n",
    )
    with running(tmp_path, 3, "-np", 3, *program) as (launcher, pids):
        launcher.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(state(pid) == "T" for pid in pids), "all are stopped")
        time.sleep(12)  # the ranks' silence, after 10 s of which one that runs would count as lost
        launcher.send_signal(signal.SIGCONT)
        out, errors = launcher.communicate(timeout=DEADLINE_S)
    assert sorted(out.splitlines()) == [f"[{rank}] trained" for rank in range(3)], errors
