"""`python -m conformance`: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from conformance.report import table
from conformance.run import run_file
from conformance.suite import FILES, STRATEGIES


def main() -> int:
    """Runs the chosen files; returns 1 when a test has failed."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("directory", type=Path, help="holds the test files as a checkout does")
    parser.add_argument("--strategy", choices=STRATEGIES, default="gradring")
    parser.add_argument("--file", action="append", help="only this file; may be repeated")
    parser.add_argument("--test", default="", help="only tests whose name contains this")
    parser.add_argument("--output", type=Path, help="writes every verdict to this file, as JSON")
    options = parser.parse_args()
    results = {}
    for file in FILES:
        if options.file and file.name not in options.file:
            continue
        path = options.directory / file.path
        if not path.exists():
            sys.exit(f"{path} does not exist; put the files of TensorFlow and tf_keras there")
        results[file.name] = run_file(file, path, options.strategy, options.test)
        if options.output:
            verdicts = {name: [asdict(v) for v in found] for name, found in results.items()}
            options.output.write_text(json.dumps(verdicts, indent=1))
    print(table(results))
    return int(any(v.status == "failed" for found in results.values() for v in found))


if __name__ == "__main__":
    sys.exit(main())
