"""``python -m soak``: runs the soak and prints what the processes hold, once a minute.

Exits with 1, and says why, if anything went wrong or did not stay flat.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from soak import report, verdict
from soak.crew import Crew, Story
from soak.plan import Part

MINUTES = 10.0
BOUND_KIB = 512.0
"""Growth per minute that is not yet a leak: an allocator's noise over some minutes."""
PARTS = (
    (0.35, Part("collectives, 2 ranks", 2)),
    (0.2, Part("collectives, 4 ranks", 4)),
    (0.15, Part("training that fails", 2, trains=True, longest=1500)),
    (0.3, Part("steady training", 2, trains=True, longest=20_000, steady=True)),
)
"""With their shares of the time."""


def main(arguments: Sequence[str]) -> int:
    """Runs all parts, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="default: 10; with much less, allocators are not yet warm",
    )
    parser.add_argument("--seed", default="", help="default: a new one, which is printed")
    parser.add_argument("--bound", type=float, default=BOUND_KIB, help="KiB/min; default: 512")
    parser.add_argument("--only", default="", help="only parts with this text in their names")
    given = parser.parse_args(arguments)
    chosen = [(share, part) for share, part in PARTS if given.only in part.name]
    total = sum(share for share, _ in chosen)
    seed = given.seed or secrets.token_hex(4)
    print(f"SEED={seed}\n{report.LIVE}", flush=True)
    began = time.monotonic()
    stories = []
    with tempfile.TemporaryDirectory(prefix="gradring-soak-logs-") as logs:
        for share, part in chosen:
            seconds = 60.0 * given.minutes * share / total
            stories.append(watched(Crew(part, seed, seconds, Path(logs)), began))
    print(f"\n{report.final(stories)}\n\n{report.summary(stories)}")
    found = [problem for story in stories for problem in verdict.problems(story, given.bound)]
    if found:
        print("\n".join(["", *found, "", f"Replay: make soak SEED={seed}"]), file=sys.stderr)
        return 1
    print(f"Memory stayed below {given.bound:g} KiB/min; descriptors and threads stayed the same.")
    return 0


def watched(crew: Crew, began: float) -> Story:
    """Runs a crew, and prints what it holds whenever a minute is over, and at its end."""
    minutes = int(time.monotonic() - began) // 60
    for _ in crew.run():
        if (now := int(time.monotonic() - began) // 60) > minutes:
            minutes = now
            print(report.live(now, crew.story), flush=True)
    print(report.live((time.monotonic() - began) / 60, crew.story), flush=True)
    return crew.story


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
