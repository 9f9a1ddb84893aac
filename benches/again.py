"""Records that are measured again: `python -m benches.again [NAME ...]`, as root for most.

A name is that of a file in `benches/results` without `.json`, or a pattern such as `network-*`.
Each record is measured by the command that it has. A command that fails leaves the old record.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
#: Commands that their records do not have; FILE is the record.
_COMMANDS = {
    "model-steps": "python -m benches.model_steps --threads default --rounds 8 --json FILE",
    "update-rules": "python -m benches.update_rules FILE",
}
_PROGRAMS = {
    "gradring": [sys.executable, "-m", "gradring"],
    "pytest": [sys.executable, "-m", "pytest"],
    "python": [sys.executable],
}


def chosen(patterns: Sequence[str], results: Path = RESULTS) -> list[Path]:
    """Returns the records that a pattern names, in order.

    Raises:
        ValueError: A pattern names no record.
    """
    names = sorted(path.stem for path in results.glob("*.json"))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"{results} has no record {pattern!r}; it has {', '.join(names)}")
    return [
        results / f"{name}.json"
        for name in names
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def command_of(record: Path, target: Path) -> list[str]:
    """Returns the command that measures a record again, and writes it to `target`.

    Raises:
        ValueError: The record has no command.
    """
    text = _COMMANDS.get(record.stem)
    if text is None:
        rows = json.loads(record.read_text())
        text = rows[0].get("command") if isinstance(rows, list) and rows else None
        if text is None:
            raise ValueError(f"{record} has no command; measure it by hand")
        head, option, _ = text.partition(" --record ")
        text = f"{head}{option or ' --json '}FILE"
    program, *arguments = shlex.split(text)
    return [*_PROGRAMS[program], *(str(target) if it == "FILE" else it for it in arguments)]


def measure(record: Path) -> bool:
    """Measures a record again; returns False, and leaves the record, if that fails."""
    with tempfile.TemporaryDirectory(dir=record.parent) as directory:
        target = Path(directory) / record.name
        command = command_of(record, target)
        print(f"{record.stem}: {shlex.join(command)}", flush=True)
        done = subprocess.run(command, check=False)
        has_succeeded = done.returncode == 0 and target.exists()
        if has_succeeded:
            target.replace(record)
    return has_succeeded


def main(arguments: list[str] | None = None) -> None:
    """Measures each chosen record, and fails if one of them could not be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="default: all")
    options = parser.parse_args(arguments)
    try:
        failed = [record.stem for record in chosen(options.names) if not measure(record)]
    except (OSError, ValueError) as error:
        raise SystemExit(f"benches.again: {error}") from None
    if failed:
        raise SystemExit(f"benches.again: not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
