"""``make ecosystem``: runs programs of others, and writes the table of docs/ecosystem.md.

python -m ecosystem dist/gradring-*.whl              # all
python -m ecosystem dist/gradring-*.whl --only keras # those with this text in their names
python -m ecosystem dist/gradring-*.whl --quick      # five of them; records nothing
python -m ecosystem dist/gradring-*.whl --missing    # those that have no result yet
python -m ecosystem dist/gradring-*.whl --no-times   # while the machine has other work
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ecosystem.catalogue import PROGRAMS, QUICK
from ecosystem.report import keep, number, records, write_page
from ecosystem.run import run


def main() -> int:
    """Runs them; 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m ecosystem", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="only programs with one of these in their names"
    )
    parser.add_argument("--quick", action="store_true", help="five of them; records nothing")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument(
        "--no-times", action="store_true", help="record no times: other programs use the cores"
    )
    given = parser.parse_args()
    failed = 0
    for program in QUICK if given.quick else PROGRAMS:
        if not any(part in program.name for part in given.only):
            continue
        if given.missing and program.name in records():  # it may have run elsewhere meanwhile
            continue
        result = run(program, given.wheel.absolute())
        if given.no_times:
            result.ratio = None
        failed += bool(result.problems)
        print(
            f"{'WRONG' if result.problems else 'right'} {program.name}: "
            f"weights {result.distance:.1e}, losses {result.loss:.1e}, "
            f"time {number(result.ratio, '.2f')}",
            *result.problems,
            sep="\n  ",
            flush=True,
        )
        if not given.quick:
            keep(result)
            # At once: what has run stays on the page, also if something ends this.
            write_page()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
