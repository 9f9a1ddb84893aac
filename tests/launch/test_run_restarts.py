"""``--max-restarts``: the whole group starts again."""

import signal
from pathlib import Path

import pytest
from launching import DEADLINE_S, gradring, script, started

from support.commands import succeeded
from support.waiting import wait_until

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
    done = succeeded("run", "-np", 2, "--max-restarts", 3, "--log-dir", logs, *program)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {attempt} 2.0" for rank in (0, 1) for attempt in (0, 1)
    ]
    assert "starts all ranks again in 1 s (restart 1/3)" in done.stderr
    assert (logs / "rank-1.log").read_text() == "0 2.0\n1 2.0\n"


@pytest.mark.parametrize(("options", "restarts"), [(("--max-restarts", 1), 1), ((), 0)])
def test_the_last_attempts_exit_code_is_returned(
    tmp_path: Path, options: tuple[object, ...], restarts: int
) -> None:
    program = script(tmp_path, ATTEMPT + "sys.exit(3 + attempt)")
    done = gradring("run", "-np", 1, *options, *program)
    assert done.returncode == 3 + restarts
    assert done.stderr.count("failed first") == 1 + restarts
    assert done.stderr.count("starts all ranks again") == restarts
    assert restarts or "again" not in done.stderr


def test_a_signal_ends_the_launcher_during_the_pause(tmp_path: Path) -> None:
    run = ("run", "-np", 1, "--max-restarts", 1000, *script(tmp_path, "sys.exit(3)"))
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr, started(*run, stderr=stderr) as launcher:
        wait_until(lambda: b"in 4 s" in errors.read_bytes(), "the third pause begins")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(DEADLINE_S) == 128 + signal.SIGTERM
