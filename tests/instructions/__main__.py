"""Instructions of hot paths beside those recorded: ``make test-instructions``.

Times vary with the machine and with what else it does; how many instructions a path takes does not.
valgrind's callgrind counts those of one thread between two points, and shows every program the same
processor. So all processors with AVX2 count alike. Two programs have the paths: ``calls.py`` those
of the Python binding, and ``paths.rs`` the others. Each writes the name of a path to its standard
output before each round of it. The round with the fewest instructions counts, in which no other
thread was in the way.

Of Python, numpy and other libraries nothing is counted: of the first program only the extension
module, and the C library where that one calls it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gradring import _native
from gradring.bench.options import refuse_debug_build

RECORD = Path(__file__).with_name("record.json")
#: What may be more or less than recorded, as a share.
TOLERANCE = 0.03
#: The same code everywhere: the kernels for AVX2, all symbols bound before anything is counted.
FIXED = {
    "GRADRING_KERNEL": "avx2",
    # To valgrind, each byte that the processor moves by itself is an instruction.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-ERMS,-FSRM",
    "LD_BIND_NOW": "1",
    "PYTHONHASHSEED": "0",
}
C_LIBRARY = re.compile(r"/(libc|libm|libpthread|ld-linux-x86-64|libgcc_s)[.-][^/]*$")


def why_not() -> str | None:
    """What is missing here, if anything."""
    if platform.machine() != "x86_64" or " avx2 " not in Path("/proc/cpuinfo").read_text():
        return "the figures are of a processor with AVX2"
    if shutil.which("valgrind") is None:
        return "valgrind is missing. Install it with: apt-get install valgrind"
    return None


def versions() -> dict[str, str]:
    """What counts depend on beside the code."""

    def told(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return {
        "compiler": told("rustc", "--version"),
        "valgrind": told("valgrind", "--version"),
        "C library": " ".join(platform.libc_ver()),
    }


def count(command: list[str], counted: Path) -> dict[str, list[int]]:
    """The instructions of each round of a program's paths, in the object ``counted``."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "callgrind"
        callgrind = [
            *("valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={dump}"),
            *("--collect-atstart=no", "--toggle-collect=measured", "--dump-after=measured"),
        ]
        done = subprocess.run(
            [*callgrind, *command],
            env=os.environ | FIXED,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        found = defaultdict(list)
        for number, path in enumerate(done.stdout.splitlines(), 1):
            found[path].append(instructions(Path(f"{dump}.{number}"), counted))
        return found


def instructions(dump: Path, counted: Path) -> int:
    """Those of ``counted`` in a dump, and of the C library where ``counted`` calls it."""
    names: dict[str, str] = {}
    total, inside, called, calls = 0, "", "", ""

    def name(reference: str) -> str:
        number, _, text = reference.partition(" ")
        return names.setdefault(number, text)

    for line in dump.read_text().splitlines():
        key, equals, value = line.partition("=")
        if key == "ob":
            inside = name(value)
        elif key == "cob":
            called = name(value)
        elif key == "calls":
            calls = value
        elif not equals and re.match(r"[+\-*\d]", line):
            # The line behind calls has all that was done in them; those that are 0 began before.
            ours = Path(inside).name == counted.name
            if ours and (not calls or (C_LIBRARY.search(called) and not calls.startswith("0 "))):
                total += int(line.split()[1])
            called = calls = ""
    return total


def count_all(paths: Path) -> dict[str, list[int]]:
    """The instructions of each round of all paths."""
    extension = Path(str(_native.__file__))
    programs = [
        ([sys.executable, "-m", "instructions.calls"], extension),
        ([str(paths)], paths),
    ]
    with ThreadPoolExecutor() as threads:
        counts = threads.map(lambda program: count(*program), programs)
        return {path: rounds for found in counts for path, rounds in found.items()}


def main() -> int:
    """Returns 1 where a path differs from its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, help="the program that was built from paths.rs")
    parser.add_argument("--record", action="store_true", help="record what is counted")
    options = parser.parse_args()
    refuse_debug_build()
    if reason := why_not():
        print(f"instructions are not counted: {reason}")
        return int("CI" in os.environ)
    rounds = count_all(options.paths.absolute())
    found = {path: min(counted) for path, counted in rounds.items()}
    if options.record:
        RECORD.write_text(json.dumps({"versions": versions(), "paths": found}, indent=2) + "\n")
    recorded = json.loads(RECORD.read_text())
    wrong = []
    for path in sorted(found.keys() | recorded["paths"].keys()):
        now, then = found.get(path, 0), recorded["paths"].get(path, 0)
        change = now / then - 1 if then else float("inf")
        print(f"{path:<36} {now:>9,} {then:>9,} {change:>+8.2%}")
        if abs(change) > TOLERANCE:
            wrong.append(path)
    if not wrong:
        return 0
    print(f"more than {TOLERANCE:.0%} from the record: {', '.join(wrong)}.")
    for name, version in versions().items():
        if version != recorded["versions"][name]:
            print(f"Counted with {version}, recorded with {recorded['versions'][name]}.")
    print("If the change is meant, record it: make test-instructions RECORD=1")
    return 1


if __name__ == "__main__":
    sys.exit(main())
