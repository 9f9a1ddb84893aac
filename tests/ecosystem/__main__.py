"""``make ecosystem``: runs programs of others, and writes the table of docs/ecosystem.md.

python -m ecosystem dist/gradring-*.whl              # all
python -m ecosystem dist/gradring-*.whl --only keras # those with this text in their names
python -m ecosystem dist/gradring-*.whl --quick      # five of them; records nothing
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ecosystem.catalogue import PROGRAMS, QUICK
from ecosystem.environments import make_environment
from ecosystem.report import keep, write_page
from ecosystem.run import run


def main() -> int:
    """Runs them; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m ecosystem", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="only programs with one of these in their names"
    )
    parser.add_argument("--quick", action="store_true", help="five of them; records nothing")
    given = parser.parse_args()
    failed = 0
    for program in QUICK if given.quick else PROGRAMS:
        if not any(part in program.name for part in given.only):
            continue
        result = run(program, make_environment(program.package, given.wheel.absolute()))
        failed += bool(result.problems)
        print(
            f"{'WRONG' if result.problems else 'right'} {program.name}: "
            f"weights {result.distance:.1e}, losses {result.loss:.1e}, time {result.ratio:.2f}",
            *result.problems,
            sep="\n  ",
            flush=True,
        )
        if not given.quick:
            keep(result)
    if not given.quick:
        write_page()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
