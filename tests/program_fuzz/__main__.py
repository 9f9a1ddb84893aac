"""``make program-fuzz``: random programs in one process, on 2 and on 3 ranks.

--seeds N     programs of so many seeds, from --from on
--seed N      shows the program of a seed
--shrink      makes the programs smaller that differ
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from program_fuzz.features import drawn
from program_fuzz.report import text_of
from program_fuzz.runs import Fuzz
from program_fuzz.shrink import shrunk
from program_fuzz.source import source_of


def main() -> int:
    """1 if a program differs."""
    parser = argparse.ArgumentParser(prog="python -m program_fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="shows the program of one seed")
    parser.add_argument("--only", type=int, nargs="*", help="these seeds")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--shrink", action="store_true", help="makes what differs smaller")
    parser.add_argument("--keep", type=Path, help="keeps sources and results in this directory")
    given = parser.parse_args()
    if given.seed is not None:
        print(source_of(drawn(given.seed)))
        return 0
    seeds = given.only or list(range(given.first, given.first + given.seeds))
    with tempfile.TemporaryDirectory(prefix="gradring-programs-") as temporary:
        directory = given.keep or Path(temporary)
        fuzz = Fuzz(directory, given.ranks, say=print)
        findings = fuzz.run({seed: drawn(seed) for seed in seeds})
        print(text_of(findings))
        failed = [each for each in findings if each.difference]
        for each in failed if given.shrink else ():
            smallest, difference = shrunk(each, directory / "shrunk")
            print(f"\nseed {each.program['seed']}: {difference}\n{source_of(smallest)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
