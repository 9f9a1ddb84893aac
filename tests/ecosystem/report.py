"""Results of the last run of each program, in a file, and the tables of the page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from ecosystem.catalogue import KERAS, PROGRAMS, TENSORFLOW, Program
from ecosystem.run import Result, variable
from support.pages import written_between

RECORDS = Path(__file__).with_name("records.json")
PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
PAGE_COLUMNS = 120
BEGIN, END = "<!-- made by: make ecosystem -->\n", "<!-- end of what make ecosystem makes -->\n"
NUMBERS = ("weights", "losses", "time")
HEADS = ("package", "program", *NUMBERS, "")
FAILED = "**failed**"


def records() -> dict[str, Result]:
    """By the names of the programs."""
    if not RECORDS.exists():
        return {}
    return {name: Result(**found) for name, found in json.loads(RECORDS.read_text()).items()}


def keep(result: Result) -> None:
    """Writes the result over that of the program's last run."""
    found = records() | {result.program: result}
    lines = [f"{json.dumps(name)}: {found[name].as_line()}" for name in sorted(found)]
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_page() -> None:
    """Replaces the tables."""
    PAGE.write_text(written_between(PAGE.read_text(), BEGIN, END, tables()))


def tables() -> str:
    """Of all programs that have run, and a sentence on architectures of `keras.applications`."""
    found = records()
    shown = [(program, found[program.name]) for program in PROGRAMS if program.name in found]
    models = [program for program in PROGRAMS if program.package == KERAS]
    others = [each for each in shown if each[0] not in models]
    architectures = [each for each in shown if each[0] in models]
    parts = [_caption(others, [program for program in PROGRAMS if program not in models])]
    parts += [_table(HEADS, map(_line, others))]
    if architectures:
        farthest = max(result.distance for _, result in architectures)
        names = ", ".join(map(_architecture, architectures))
        sentences = (
            f"Of `keras.applications` {_counted(architectures, models)} Run were {names}. Weights "
            f"are at most {farthest:.0e} from one process."
        )
        parts += [textwrap.fill(sentences, PAGE_COLUMNS)]
    return "\n\n".join(parts) + "\n"


def _caption(shown: Sequence[tuple[Program, Result]], of: Sequence[Program]) -> str:
    right = [program for program, result in shown if not result.problems]
    packages = {program.package.name for program in right}
    unchanged = sum(not program.changed for program in right)
    machines = " and ".join(sorted({result.machine for _, result in shown}))
    caption = (
        f"{_counted(shown, of)} They use {len(packages)} packages; {unchanged} of those that went "
        f"right are unchanged. TensorFlow {TENSORFLOW} and Keras {KERAS.version}, or tf_keras of "
        f"that TensorFlow, where no other is named; {machines}."
    )
    return textwrap.fill(caption, PAGE_COLUMNS)


def _counted(shown: Sequence[tuple[Program, Result]], of: Sequence[Program]) -> str:
    right = sum(not result.problems for _, result in shown)
    days = sorted({result.day for _, result in shown})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"
    missing = len(of) - len(shown)
    others = f" {missing} others were not run." if missing else ""
    return f"{right} of {len(shown)} programs went as they must ({when}).{others}"


def _table(heads: Sequence[str], lines: Iterable[str]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def _line(shown: tuple[Program, Result]) -> str:
    program, result = shown
    package = program.package
    names = [f"{package.name} {package.version}"]
    if package.tensorflow != TENSORFLOW:
        names.append(f"TensorFlow {package.tensorflow}")
    notes = [program.why] if program.why else []
    if program.changed:
        notes.append(f"{program.changed} lines changed")
    if program.option:
        is_option = not (program.by_mpirun or program.starts_ranks)
        asked = f"--{program.option}" if is_option else f"{variable(program.option)}=1"
        notes.append(f"`{asked}`" + (", mpirun" if program.by_mpirun else ""))
    cells = [
        ", ".join(names),
        program.what,
        *_numbers(program, result),
        FAILED if result.problems else "; ".join(notes),
    ]
    return f"| {' | '.join(cells)} |"


def _architecture(shown: tuple[Program, Result]) -> str:
    program, result = shown
    return " ".join([*program.arguments, *([FAILED] if result.problems else [])])


def _numbers(program: Program, result: Result) -> list[str]:
    return [
        f"{result.distance:.0e}",
        f"{result.loss:.0e}" if program.compares_losses else "",
        number(result.ratio, ".1f"),
    ]


def number(found: float | None, form: str) -> str:
    """In this form, or nothing where there is none."""
    return "" if found is None else format(found, form)
