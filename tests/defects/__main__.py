"""Puts each deliberate defect into a copy of the repository, and has the suite look for it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from defects.catalogue import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
#: What pytest returns when a test has failed.
FAILED = 1


def is_found(defect: Defect, copy: Path) -> bool:
    """Whether a test fails because of it."""
    file = copy / defect.file
    text = file.read_text()
    if text.count(defect.right) != 1:
        raise ValueError(f"{defect.file} has {defect.right!r} {text.count(defect.right)} times")
    if fails_as_it_is(defect.found_by, copy):
        raise ValueError(f"{defect.found_by} fails without a defect, too")
    file.write_text(text.replace(defect.right, defect.wrong))
    try:
        return fails(defect.found_by, copy)
    finally:
        file.write_text(text)


@functools.cache
def fails_as_it_is(tests: str, copy: Path) -> bool:
    """Whether some of the tests fail in a copy without a defect."""
    return fails(tests, copy)


def fails(tests: str, copy: Path) -> bool:
    """Whether some of the tests fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    if "packaging" in tests:
        command += ["--wheel", "README.md"]
    done = subprocess.run(
        [*command, tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": f"{copy / 'python'}:{copy / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, FAILED):
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == FAILED


def main() -> int:
    """Exits with 1 if a defect is not found."""
    chosen = [d for d in DEFECTS if all(word in d.file for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory(prefix="gradring-defects-") as directory:
        copy = Path(directory, "repository")
        files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        native = [str(path.relative_to(ROOT)) for path in ROOT.glob("python/gradring/_native*.so")]
        for name in [*files.split("\0")[:-1], *native]:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        found = 0
        for defect in chosen:
            was_found = is_found(defect, copy)
            found += was_found
            verdict = "found by" if was_found else "NOT FOUND by"
            print(f"{defect.file}: {defect.wrong!r}: {verdict} {defect.found_by}", flush=True)
    print(f"{found} of {len(chosen)} defects found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
