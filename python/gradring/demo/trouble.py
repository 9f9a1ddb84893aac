"""``gradring demo --slow-rank R`` and ``--kill R``: what a job says about a rank in trouble."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from gradring.demo.story import require_packages
from gradring.demo.variants import DEADLINE_S, GRADRING, child_of

SLOW_MS = 20
EPOCHS = 10


def show_slow_rank(rank: int, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains with one rank that sleeps in every step.

    Args:
        rank: The rank to slow down.
        report: Directory for the logs and the times of all steps.
        stream: Where to write.

    Returns:
        0 if the live lines or the verdict named the rank, else 1.

    Raises:
        ConfigError: A package is missing.
    """
    require_packages()
    _say(stream, f"Two workers train; rank {rank} sleeps {SLOW_MS} ms in every step.\n")
    started_s = time.monotonic()
    options = ["--slow-rank", str(rank), "--slow-ms", str(SLOW_MS), "--epochs", str(EPOCHS)]
    _, lines = _train(report, [], options, stream)
    named = re.compile(rf"slowest: rank {rank} |Rank {rank} on \S+ is the slowest")
    at_s = next((at_s for at_s, line in lines if named.search(line)), None)
    if at_s is None:
        _say(stream, f"\nRank {rank} was not named: other programs use this machine; try again.")
        return 1
    _say(stream, f"\nRank {rank} was named after {at_s - started_s:.0f} s, start-up included.")
    return 0


def show_killed_rank(rank: int, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains, kills one rank with SIGKILL in the middle, and trains on from the last checkpoint.

    Then it explains what the ranks of the first attempt have left behind.

    Args:
        rank: The rank to kill.
        report: Directory for the logs, the times of all steps and the flight records.
        stream: Where to write.

    Returns:
        0 if the other rank's error named the rank, and the restart went on from a checkpoint to the
        end of the training; else 1.

    Raises:
        ConfigError: A package is missing.
    """
    from gradring.observe import explanation, places
    from gradring.observe.records import read

    require_packages()
    _say(
        stream,
        f"Two workers train and save after each epoch; rank {rank} is killed (SIGKILL) in the "
        "middle,\nand gradring run --max-restarts 1 starts both again.\n",
    )
    with tempfile.TemporaryDirectory(prefix="gradring-demo-") as temporary:
        checkpoint = Path(temporary, "checkpoint")
        options = ["--kill", str(rank), "--epochs", str(EPOCHS), "--checkpoint", str(checkpoint)]
        exit_code, lines = _train(report, ["--max-restarts", "1"], options, stream)
    first = places.of_attempt(places.flight_of(report), 0)
    if any(places.written(first)):
        _say(stream, f"\ngradring explain {first}")
        for sentence in explanation.explain(read(first)):
            _say(stream, sentence)
    text = "".join(line for _, line in lines)
    named = re.search(rf"PeerLostError: .*rank {rank} on ", text)
    resumed = re.search(r"resumes after step (\d+)", text)
    finished = re.search(r"finished .*", text)
    if exit_code != 0 or not (named and resumed and finished):
        _say(stream, "\nThe training did not come to its end; the lines above say why.")
        return 1
    _say(
        stream,
        f"\nRank {rank} was named; the restart went on after step {resumed[1]} and {finished[0]}.",
    )
    return 0


def _train(
    report: Path, launch: Sequence[str], options: Sequence[str], stream: TextIO
) -> tuple[int, list[tuple[float, str]]]:
    """Runs the training and shows what it prints; its exit code, its lines, when they came."""
    command = [
        # Otherwise TensorFlow talks about floating point in the middle of the lines to see.
        *("env", "-u", "GRADRING_FLIGHT_DIR", "TF_ENABLE_ONEDNN_OPTS=0"),
        *(sys.executable, "-m", "gradring", "run", "-np", str(GRADRING.world_size)),
        *("--log-dir", str(report), *launch, "--"),
        *(sys.executable, "-m", "gradring.demo.trouble_train", *options),
    ]
    lines: list[tuple[float, str]] = []
    with child_of(command, GRADRING.threads) as child:

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.append((time.monotonic(), line))
                stream.write(line)
                stream.flush()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            child.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            _say(stream, f"The training has not ended within {DEADLINE_S:g} s and is stopped.")
    reader.join(timeout=DEADLINE_S)
    return child.returncode, lines


def _say(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)
