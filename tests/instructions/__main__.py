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
import math
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
from typing import NamedTuple

from gradring import _native
from gradring.tools.bench.options import refuse_debug_build

RECORD = Path(__file__).with_name("record.json")
#: How many instructions may be more or less than recorded, as a share.
TOLERANCE = 0.03
#: So many move where the compiler takes another turn because of code elsewhere.
SLACK = 20
#: The same code everywhere: the kernels for AVX2, all symbols bound before anything is counted.
FIXED = {
    "GRADRING_KERNEL": "avx2",
    # To valgrind, each byte that the processor moves by itself is an instruction.
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-ERMS,-FSRM",
    "LD_BIND_NOW": "1",
    "PYTHONHASHSEED": "0",
}
ALLOCATIONS = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")
C_LIBRARY = re.compile(r"/(libc|libm|libpthread|ld-linux-x86-64|libgcc_s)[.-][^/]*$")


class Counts(NamedTuple):
    """Of one path."""

    #: Without those of the allocator, which depend on what was freed before.
    instructions: int
    allocations: int


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


def count(command: list[str], counted: Path) -> dict[str, list[Counts]]:
    """What the object ``counted`` does in each round of a program's paths."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "callgrind"
        callgrind = [
            *("valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={dump}"),
            *("--collect-atstart=no", "--toggle-collect=measured"),
            *("--zero-before=measured", "--dump-after=measured"),
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
            found[path].append(counts_in(Path(f"{dump}.{number}"), counted))
        return found


def counts_in(dump: Path, counted: Path) -> Counts:
    """Those of ``counted`` in a dump, and of the C library where ``counted`` calls it."""
    names: dict[str, str] = {}
    instructions = allocations = 0
    inside = called = function = calls = ""

    def name(kind: str, reference: str) -> str:
        number, _, text = reference.partition(" ")
        return names.setdefault(kind + number, text)

    for line in dump.read_text().splitlines():
        key, equals, value = line.partition("=")
        if key == "ob":
            inside = name("ob", value)
        elif key == "cob":
            called = name("ob", value)
        elif key in ("fn", "cfn"):
            function = name("fn", value)
        elif key == "calls":
            calls = value.split()[0]
        elif not equals and re.match(r"[+\-*\d]", line):
            # The line behind calls has all that was done in them; those that are 0 began before.
            outside = calls != "0" and C_LIBRARY.search(called)
            if Path(inside).name != counted.name or (calls and not outside):
                pass
            elif calls and function in ALLOCATIONS:
                allocations += int(calls)
            elif not calls or function != "free":
                instructions += int(line.split()[1])
            called = calls = ""
    return Counts(instructions, allocations)


def count_all(paths: Path) -> dict[str, list[Counts]]:
    """Those of each round of all paths."""
    extension = Path(str(_native.__file__))
    programs = [
        ([sys.executable, "-m", "instructions.calls"], extension),
        ([str(paths)], paths),
    ]
    with ThreadPoolExecutor() as threads:
        counts = threads.map(lambda program: count(*program), programs)
        return {path: rounds for found in counts for path, rounds in found.items()}


def differences(found: dict[str, Counts], recorded: dict[str, Counts]) -> list[str]:
    """Prints both; returns the paths that differ."""
    wrong = []
    print(
        f"{'':<32} {'instructions':>12} {'recorded':>9} {'':>8} {'allocations':>12} {'recorded':>9}"
    )
    for path in sorted(found.keys() | recorded.keys()):
        now, then = (counts.get(path, Counts(0, 0)) for counts in (found, recorded))
        change = now.instructions / then.instructions - 1 if then.instructions else math.inf
        print(
            f"{path:<32} {now.instructions:>12,} {then.instructions:>9,} {change:>+8.2%} "
            f"{now.allocations:>12} {then.allocations:>9}"
        )
        allowed = max(TOLERANCE * then.instructions, SLACK)
        moved = abs(now.instructions - then.instructions) > allowed
        if moved or now.allocations != then.allocations:
            wrong.append(path)
    return wrong


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
    found = {path: Counts(*map(min, zip(*counts, strict=True))) for path, counts in rounds.items()}
    if options.record:
        figures = {path: counts._asdict() for path, counts in found.items()}
        RECORD.write_text(json.dumps({"versions": versions(), "paths": figures}, indent=2) + "\n")
    record = json.loads(RECORD.read_text())
    recorded = {path: Counts(**figures) for path, figures in record["paths"].items()}
    wrong = differences(found, recorded)
    if not wrong:
        return 0
    print(
        f"More than {TOLERANCE:.0%} from the recorded instructions, or other allocations: "
        f"{', '.join(wrong)}."
    )
    for name, version in versions().items():
        if version != record["versions"][name]:
            print(f"Counted with {version}, recorded with {record['versions'][name]}.")
    print("If the change is meant, record it: make test-instructions RECORD=1")
    return 1


if __name__ == "__main__":
    sys.exit(main())
