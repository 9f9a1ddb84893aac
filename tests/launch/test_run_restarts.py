"""``--max-restarts``: the whole group starts again."""

import signal
import subprocess
from pathlib import Path

from launching import DEADLINE_S, command_line, gradring, script

from waiting import wait_until

ATTEMPT = "attempt = int(os.environ['GRADRING_RESTART'])\n"


def test_all_ranks_start_again_and_know_the_attempt(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    program = script(
        tmp_path,
        ATTEMPT + "import gradring, numpy as np, pathlib, time\n"
        "comm = gradring.init()\n"
        "print(attempt, comm.all_reduce(np.ones(1))[0], flush=True)\n"
        f"printed = pathlib.Path({str(printed)!r})\n"
        "if rank == 0: printed.touch()\n"
        "while not printed.exists(): time.sleep(0.05)\n"
        "if rank == 1 and attempt == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "comm.barrier()\n",
    )
    logs = tmp_path / "logs"
    done = gradring("run", "-np", 2, "--max-restarts", 3, "--log-dir", logs, *program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {attempt} 2.0" for rank in (0, 1) for attempt in (0, 1)
    ]
    assert "starts all ranks again in 1 s (restart 1/3)" in done.stderr
    assert (logs / "rank-1.log").read_text() == "0 2.0\n1 2.0\n"


def test_the_last_attempts_exit_code_is_returned(tmp_path: Path) -> None:
    program = script(tmp_path, ATTEMPT + "sys.exit(3 + attempt)")
    done = gradring("run", "-np", 1, "--max-restarts", 1, *program)
    assert done.returncode == 4
    assert done.stderr.count("failed first") == 2


def test_without_the_option_nothing_starts_again(tmp_path: Path) -> None:
    done = gradring("run", "-np", 1, *script(tmp_path, ATTEMPT + "sys.exit(3)"))
    assert done.returncode == 3
    assert "again" not in done.stderr


def test_a_signal_ends_the_launcher_during_the_pause(tmp_path: Path) -> None:
    program = script(tmp_path, ATTEMPT + "sys.exit(3)")
    command = command_line("run", "-np", 1, "--max-restarts", 1000, *program)
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as launcher:
        wait_until(lambda: b"in 4 s" in errors.read_bytes(), "the third pause begins")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
