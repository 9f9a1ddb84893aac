"""``python -m soak.churn``: ranks of an elastic training are killed, stopped and told to leave.

Four ranks train with `fit` under ``gradring run --min-np 2``, which replaces those that are lost.
One process, the last rank of the first group, is left alone: it shows whether anything grows over
the generations that it sees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak.crew import MALLOC
from soak.verdict import growth

WORKERS = 4
#: What happens to a process, and how often in a hundred times.
FATES = {"killed": 50, "two killed": 10, "stopped for 2 s": 20, "stopped for 25 s": 5, "told": 15}
#: Until the group is whole again, at most; then the next fate comes anyway.
WHOLE_WITHIN_S = 25.0
REQUIRED_ACCURACY = 0.97
END_S = 120.0
#: In its first generations a process still fills TensorFlow's pools and caches.
WARM_UP = 10
#: So many generations tell growth from noise, after these.
ENOUGH = 40
#: Generations that are nearer to each other tell noise.
APART = 5
#: What a process may hold more after each generation: a leak of one in ten is twice as much.
GROWTH = {"memory_kib": 512.0, "threads": 0.05, "descriptors": 0.05}


class Churn:
    """One job and what happens to it."""

    def __init__(self, directory: Path, seed: str) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self.fates: Counter[str] = Counter()
        program = Path(__file__).with_name("churn_training.py")
        command = [sys.executable, "-m", "gradring", "run", "-np", str(WORKERS), "--min-np", "2"]
        command += ["--host-failures", "0", "--log-dir", str(directory / "logs"), "--"]
        variables = {"PYTHONPATH": str(program.parents[1]), "TF_CPP_MIN_LOG_LEVEL": "2"}
        self.launcher = subprocess.Popen(
            [*command, sys.executable, str(program), str(directory)],
            env={**os.environ, **MALLOC, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._threads: list[threading.Timer] = []

    def notes(self) -> list[dict[str, Any]]:
        """What the processes have noted so far, in order."""
        files = self._directory.glob("*.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        noted = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(noted, key=lambda note: note["at_s"])

    def members(self) -> dict[int, dict[str, Any]]:
        """The last group that each living process was in."""
        groups = {note["pid"]: note for note in self.notes() if note["kind"] == "group"}
        return {pid: note for pid, note in groups.items() if Path(f"/proc/{pid}").exists()}

    def is_whole(self) -> bool:
        """Whether all that should be are in one group."""
        members = self.members().values()
        newest = max((note["generation"] for note in members), default=0)
        return [n["generation"] for n in members].count(newest) == WORKERS

    def disturb(self) -> None:
        """One fate."""
        kept = next(n["pid"] for n in self.notes() if n["kind"] == "group" and n["rank"] == 3)
        living = sorted(pid for pid in self.members() if pid != kept)
        if not living:
            return
        (fate,) = self._random.choices(list(FATES), list(FATES.values()))
        victims = self._random.sample(living, min(len(living), 1 + (fate == "two killed")))
        self.fates[fate] += 1
        for pid in victims:
            if "killed" in fate:
                _signal(pid, signal.SIGKILL)
            elif fate == "told":
                _signal(pid, signal.SIGTERM)
            else:
                _signal(pid, signal.SIGSTOP)
                seconds = float(fate.split()[2])
                timer = threading.Timer(seconds, _signal, [pid, signal.SIGCONT])
                timer.start()
                self._threads.append(timer)

    def run(self, seconds: float) -> int:
        """Disturbs for so long; the launcher's exit code."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.launcher.poll() is None:
            patience = time.monotonic() + WHOLE_WITHIN_S
            while not self.is_whole() and time.monotonic() < min(patience, until):
                time.sleep(0.2)
            time.sleep(self._random.uniform(0.2, 2.0))
            if self.members():
                self.disturb()
        for timer in self._threads:
            timer.join()
        patience = time.monotonic() + WHOLE_WITHIN_S
        while not self.is_whole() and time.monotonic() < patience:
            time.sleep(0.2)
        (self._directory / "stop").touch()
        return self.launcher.wait(timeout=END_S)


def report(notes: list[dict[str, Any]], fates: Counter[str], exit_code: int) -> list[str]:
    """Prints what happened; what is wrong with it."""
    groups = [note for note in notes if note["kind"] == "group"]
    ends = [note for note in notes if note["kind"] == "end"]
    kept_pid = next(note["pid"] for note in groups if note["rank"] == WORKERS - 1)
    kept = [note for note in groups if note["pid"] == kept_pid]
    generations = len({note["generation"] for note in groups})
    print(f"{generations} generations, {max(note['step'] for note in notes)} steps, {dict(fates)}")
    problems = grown(kept)
    for what in GROWTH:
        print(f"{what} of the process that stayed: {' '.join(str(n[what]) for n in kept)}")
    for end in ends:
        print(f"rank {end['rank']}: accuracy {end['accuracy']:.3f}, weights {end['digest'][:16]}")
    if exit_code != 0:
        problems.append(f"the launcher ended with {exit_code}")
    if len({end["digest"] for end in ends}) != 1 or len(ends) < 2:
        problems.append(f"{len(ends)} ranks ended, not all with the same weights")
    if any(end["accuracy"] < REQUIRED_ACCURACY for end in ends):
        problems.append(f"the accuracy is below {REQUIRED_ACCURACY}")
    return problems


def grown(groups: Sequence[dict[str, Any]]) -> list[str]:
    """What one process held more and more of, at the beginnings of its groups."""
    warm = groups[WARM_UP:]
    if len(warm) < ENOUGH:
        return [
            f"{len(groups)} generations are too few to tell what grows; give it more time, for "
            f"{WARM_UP + ENOUGH}"
        ]
    problems = []
    for what, bound in GROWTH.items():
        points = [(float(number), float(note[what])) for number, note in enumerate(warm)]
        rate = growth([points], APART)
        assert rate is not None
        if rate > bound:
            problems.append(f"{what} grew by {rate:.3g} a generation, more than {bound:g}")
    return problems


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def main() -> int:
    """Runs the churn; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", default="", help="default: a new one, which is printed")
    given = parser.parse_args()
    seed = given.seed or secrets.token_hex(4)
    print(f"SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gradring-churn-") as temporary:
        churn = Churn(Path(temporary), seed)
        try:
            exit_code = churn.run(60.0 * given.minutes)
        finally:
            churn.launcher.terminate()
        problems = report(churn.notes(), churn.fates, exit_code)
        if problems:
            for log in sorted((Path(temporary) / "logs").glob("rank-*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
    print("\n".join(problems) or "Nothing grew, and all ranks ended with the same weights.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
