"""Times of imports and of forming a group: `python -m benches.start_up`.

*Import* is how much longer an interpreter runs that imports a package than one that does nothing;
all take turns. *Forming* begins when the last rank of a group calls `gradring.init()`, and ends
when all have it; *all* begins before the first interpreter starts. Modules are compiled before, as
`pip install` does it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benches.harness import Parser, print_surroundings
from gradring.machine.ports import LOOPBACK, free_ports

IMPORTS = {"nothing": "", "numpy": "import numpy", "gradring": "import gradring"}
#: The clock is the same for all processes of a host.
RANK = """
import json, time, gradring
called = time.monotonic()
with gradring.init():
    print(json.dumps([called, time.monotonic()]), flush=True)
"""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Start:
    """Seconds that one group took."""

    forming_s: float
    all_s: float


def run_s(program: str, environ: Mapping[str, str]) -> float:
    """Seconds that an interpreter runs."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=TIMEOUT_S)
    return time.monotonic() - begun


def start(ranks: int, transport: str, environ: Mapping[str, str]) -> Start:
    """Starts a group, and ends it."""
    (port,) = free_ports(1)
    environ = {
        **environ,
        "GRADRING_WORLD_SIZE": str(ranks),
        "GRADRING_RENDEZVOUS": f"{LOOPBACK}:{port}",
        "GRADRING_TOKEN": "start-up",
        "GRADRING_TRANSPORT": transport,
    }
    command = [sys.executable, "-c", RANK]
    begun = time.monotonic()
    processes = [
        subprocess.Popen(
            command, env={**environ, "GRADRING_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    called, formed = zip(*(json.loads(times) for times in said), strict=True)
    return Start(max(formed) - max(called), max(formed) - begun)


def report(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Measures and prints."""
    # The first ones compile.
    turns = [
        [run_s(program, environ) for program in IMPORTS.values()]
        for _ in range(1 + 4 * options.rounds)
    ][1:]
    nothing, *others = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    for name, seconds in zip([*IMPORTS][1:], others, strict=True):
        print(f"import {name}: {1e3 * (seconds - nothing):.0f} ms")
    groups = [(ranks, transport) for ranks in options.ranks for transport in options.transports]
    rounds = [[start(*group, environ) for group in groups] for _ in range(options.rounds)]
    for (ranks, transport), starts in zip(groups, zip(*rounds, strict=True), strict=True):
        forming_s = statistics.median(each.forming_s for each in starts)
        all_s = statistics.median(each.all_s for each in starts)
        print(f"{ranks} ranks over {transport}: forming {forming_s:.3f} s, all {all_s:.2f} s")


def main() -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32], help="sizes of groups")
    parser.add_argument("--transports", nargs="+", default=["tcp", "shm"])
    parser.add_argument("--rounds", type=int, default=5, help="of each group; imports four times")
    options = parser.parse()
    print_surroundings()
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GRADRING_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as compiled:
        report(options, {**kept, "PYTHONPYCACHEPREFIX": compiled})


if __name__ == "__main__":
    main()
