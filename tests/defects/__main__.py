"""Puts each deliberate defect into a copy of the repository, and has the suite look for it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from defects.catalogue import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
#: What pytest and cargo return when a test has failed.
FAILED = (1, 101)
#: One for all defects, so that each is compiled in seconds.
BUILD = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "defects").absolute()


def is_found(defect: Defect, copy: Path) -> bool:
    """Whether a test fails because of it."""
    file = copy / defect.file
    text = file.read_text()
    if text.count(defect.right) != 1:
        raise ValueError(f"{defect.file} has {defect.right!r} {text.count(defect.right)} times")
    if fails_as_it_is(defect.found_by, copy):
        raise ValueError(f"{defect.found_by} fails without a defect, too")
    is_extension = defect.file.startswith("rust/") and is_python(defect.found_by)
    file.write_text(text.replace(defect.right, defect.wrong))
    try:
        if is_extension:
            build_extension(copy)
        return fails(defect.found_by, copy)
    finally:
        file.write_text(text)
        if is_extension:
            build_extension(copy)


@functools.cache
def fails_as_it_is(tests: str, copy: Path) -> bool:
    """Whether some of the tests fail in a copy without a defect."""
    return fails(tests, copy)


def fails(tests: str, copy: Path) -> bool:
    """Whether some of the tests fail."""
    if is_python(tests):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    else:
        command = ["cargo", "test", "--quiet", "--package", *tests.split()]
        # What does not compile is no defect.
        run([*command, "--no-run"], copy)
    done = run(command, copy, FAILED)
    if not is_python(tests) and not re.search(r"running [1-9]", done.stdout):
        raise ValueError(f"{tests} names no test")
    return done.returncode in FAILED


def is_python(tests: str) -> bool:
    """Whether pytest runs these tests, and not cargo."""
    return tests.startswith("tests/")


def build_extension(copy: Path) -> None:
    """Puts the extension of a copy into its package."""
    run(["cargo", "build", "--quiet", "--package", "gradring-python"], copy)
    for native in copy.glob("python/gradring/_native*.so"):
        native.unlink()
    shutil.copy2(BUILD / "debug/lib_native.so", copy / "python/gradring/_native.abi3.so")


def run(
    command: list[str], copy: Path, failures: Collection[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a copy, which must end well or with one of these codes."""
    done = subprocess.run(
        command,
        cwd=copy,
        env={
            **os.environ,
            "PYTHONPATH": f"{copy / 'python'}:{copy / 'tests'}",
            "CARGO_TARGET_DIR": str(BUILD),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, *failures):
        raise RuntimeError(done.stdout + done.stderr)
    return done


def main() -> int:
    """Exits with 1 if a defect is not found; of files that have all the words in their path."""
    words = sys.argv[1:]
    chosen = [defect for defect in DEFECTS if all(word in defect.file for word in words)]
    if not chosen:
        sys.exit(f"no deliberate defect is in a file with {' and '.join(words)} in its path")
    with tempfile.TemporaryDirectory(prefix="gradring-defects-") as directory:
        copy = Path(directory, "repository")
        files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        native = [str(path.relative_to(ROOT)) for path in ROOT.glob("python/gradring/_native*.so")]
        for name in [*files.split("\0")[:-1], *native]:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            # New for cargo, which may have built the file with a defect the last time.
            shutil.copy(ROOT / name, copy / name)
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
