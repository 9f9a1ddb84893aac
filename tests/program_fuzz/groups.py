"""Processes that run programs: one process, and groups of ranks, one at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
#: Seconds without a result after which a program hangs; the first also waits for TensorFlow.
DEADLINE_S = 150


@dataclass
class Outcome:
    """What became of a program on some number of ranks."""

    results: list[Any] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True)
class Setting:
    """How a group of processes is started; no ranks are one process, without gradring."""

    ranks: int
    is_given: bool = False

    @property
    def launcher(self) -> list[str]:
        if not self.ranks:
            return []
        strategy = ["--with-strategy"] if self.is_given else []
        run = [sys.executable, "-m", "gradring", "run", *strategy, "-np", str(self.ranks), "--"]
        return run

    def __str__(self) -> str:
        return f"{self.ranks} ranks" if self.ranks else "one process"


def run(setting: Setting, seeds: Sequence[int], sources: Path, results: Path) -> dict[int, Outcome]:
    """Runs the sources of all seeds; starts anew behind one that fails."""
    results.mkdir(parents=True, exist_ok=True)
    found: dict[int, Outcome] = {}
    left = list(seeds)
    while left:
        error = _run_some(setting, left, sources, results)
        for seed in left:
            outcome = _outcome(setting, seed, results)
            if outcome is None:
                break
            found[seed] = outcome
        is_explained = any(found[seed].error for seed in left if seed in found)
        left = [seed for seed in left if seed not in found]
        if left and not is_explained:
            found[left[0]] = Outcome(error=error or "ends without a result")
            left = left[1:]
    return found


def _outcome(setting: Setting, seed: int, results: Path) -> Outcome | None:
    """What all ranks have written of a program; None if one has not, and none has an error."""
    files = [results / f"{seed}.{rank}.json" for rank in range(max(1, setting.ranks))]
    read = [json.loads(file.read_text()) for file in files if file.exists()]
    errors = [f"{each['error']} ({each['place']})" for each in read if "error" in each]
    if errors:  # others may have lost a peer by it
        own = [each for each in errors if "PeerLost" not in each and "Aborted" not in each]
        return Outcome(error=(own or errors)[0])
    if len(read) < len(files):
        return None
    return Outcome([each["result"] for each in read])


def _run_some(setting: Setting, seeds: Sequence[int], sources: Path, results: Path) -> str:
    """Why the processes do not end well, or nothing."""
    command = [*setting.launcher, sys.executable, WORKER, sources, results, *map(str, seeds)]
    log = results / "log.txt"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    # The package beside these tests, also where another one is installed.
    paths = [str(WORKER.parents[2] / "python"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(each) for each in command], stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        moved, seen = time.monotonic(), 0
        while process.poll() is None:
            time.sleep(0.1)
            count = len(list(results.glob("*.json")))
            if count != seen:
                moved, seen = time.monotonic(), count
            if time.monotonic() - moved > DEADLINE_S:
                _end(process)
                return "hangs"
    if process.returncode:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        return f"exit code {process.returncode}: {' | '.join(lines[-4:])[-600:]}"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, which ends its ranks; what is left of its session is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
