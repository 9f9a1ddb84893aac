"""``make test-all``: one kind of tests after the other, and a table of what ran.

A kind that fails does not keep the others from running.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kind:
    """Tests of one kind: what they are, and the command that runs them."""

    name: str
    command: tuple[str, ...]


KINDS = (
    Kind("lints", ("make", "lint")),
    Kind("Rust, schedules of every world size", ("make", "test-rust", "EVERY_WORLD_SIZE=1")),
    Kind("instructions of hot paths", ("make", "test-instructions")),
    Kind("100,000 simulated groups of each kind", ("make", "simulate")),
    Kind("200 random training programs", ("make", "program-fuzz", "SEEDS=200")),
    Kind("all interleavings of shared memory", ("make", "loom")),
    Kind("Python, also the slow ones", ("make", "test-python", "SLOW_TOO=1")),
    Kind("Keras' own tests of trainers", ("make", "conformance-keras")),
    Kind("deliberate defects", ("make", "defects")),
    Kind("the wheel, under every Python", ("make", "test-wheel", "SLOW_TOO=1")),
    Kind("five programs with packages of others", ("make", "ecosystem", "QUICK=1")),
    Kind("Slurm, MPI and Ray", ("make", "test-engines")),
    Kind("machines with kernels of their own", ("make", "test-machines")),
    Kind("ten minutes of random work", ("make", "soak")),
    Kind("ten minutes of an elastic job that changes", ("make", "churn")),
)


def main() -> int:
    """Runs all kinds; returns 1 if one failed."""
    rows = []
    for kind in KINDS:
        began = time.monotonic()
        code = subprocess.run(kind.command, cwd=ROOT, check=False).returncode
        minutes = (time.monotonic() - began) / 60
        rows.append((kind.name, "passed" if code == 0 else "FAILED", f"{minutes:.1f} min"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print()
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return int(any(outcome == "FAILED" for _, outcome, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
