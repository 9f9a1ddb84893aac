"""However a run ends, none of its processes is left."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DEADLINE_S, children_of, is_running, pids_noted, started, wait_until_gone

from support.commands import command_line, succeeded

HERE = str(Path(__file__).parent)


def sleepers(directory: Path, function: str = "all_sleep_with_a_child") -> list[str]:
    code = f"import sys; sys.path.insert(0, {HERE!r}); import ranks_to_run as r; "
    return [sys.executable, "-c", f"{code} r.{function}({str(directory)!r})"]


def start(
    directory: Path, *options: object, **variables: str
) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
    """A launcher of two sleepers, whose output nobody wants."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = ("run", "-np", 2, *options, *sleepers(directory))
    return started(*run, env={**os.environ, **variables}, **silent)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_ranks_and_their_children(
    tmp_path: Path, signum: int
) -> None:
    with start(tmp_path, "--grace", 1) as launcher:
        pids = pids_noted(tmp_path, 2)
        launcher.send_signal(signum)
        assert launcher.wait(DEADLINE_S) == 128 + signum
    wait_until_gone(pids)


def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    with start(tmp_path, "--grace", 10 * DEADLINE_S) as launcher:
        pids = pids_noted(tmp_path, 2)
        launcher.send_signal(signal.SIGTERM)
        wait_until_gone(pids[::2])  # the children ignore SIGTERM
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(DEADLINE_S)
    wait_until_gone(pids)


def test_sigkill_to_the_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    with start(tmp_path) as launcher:
        pids = pids_noted(tmp_path, 2)
        assert all(map(is_running, pids))
        launcher.kill()
        launcher.wait(DEADLINE_S)
    wait_until_gone(pids)


def test_ranks_end_with_their_launcher_though_its_guardian_is_busy(tmp_path: Path) -> None:
    with start(tmp_path) as launcher:
        pids = pids_noted(tmp_path, 2)
        (guardian,) = guardians_of(launcher.pid)
        os.kill(guardian, signal.SIGSTOP)
        try:
            launcher.kill()
            launcher.wait(DEADLINE_S)
            wait_until_gone(pids[::2])
        finally:
            os.kill(guardian, signal.SIGCONT)
    wait_until_gone(pids)


def guardians_of(launcher: int) -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(launcher)}
    return [pid for pid, line in lines.items() if b"guardian.py" in line]


def test_children_of_a_killed_rank_are_ended(tmp_path: Path) -> None:
    with start(tmp_path, "--grace", 1) as launcher:
        pids = pids_noted(tmp_path, 2)
        os.kill(pids[2], signal.SIGKILL)
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGKILL
    wait_until_gone(pids)


def test_children_that_outlive_a_successful_rank_are_ended(tmp_path: Path) -> None:
    succeeded("run", "-np", 2, "--grace", 1, *sleepers(tmp_path, "note_pids"))
    wait_until_gone(pids_noted(tmp_path, 2))


def test_zombies_that_nobody_collects_do_not_keep_the_launcher(tmp_path: Path) -> None:
    """As in a container whose first process is not an init."""
    program = "import subprocess; subprocess.Popen(['sleep', '300'])"
    launcher = command_line("run", "-np", 1, "--grace", 300, sys.executable, "-c", program)
    become_subreaper = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"
    code = f"{become_subreaper}; import subprocess, sys; sys.exit(subprocess.call({launcher!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)
