"""Harness of the programs here: options, the machine, steps in turns, and a record of rows."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from gradring.errors import ConfigError
from gradring.machine import resources
from gradring.tools.bench.options import parse_rate, parse_sizes, refuse_debug_build
from gradring.tools.bench.record import versions
from gradring.tools.cli.arguments import usage

#: For a run of all ranks.
TIMEOUT_S = 1800.0
#: None on a rank that has no part in a kind of step: it waits for the others.
Step = Callable[[], object] | None


class Parser(argparse.ArgumentParser):
    """The options of one program."""

    def __init__(self, doc: str | None) -> None:
        """Has only that for builds; the first line of ``doc`` says what the program does."""
        super().__init__(description=(doc or "").partition("\n")[0])
        self.add_argument("--allow-debug", action="store_true", help="measure a debug build, too")

    def add_rounds(self, rounds: int) -> None:
        self.add_argument("--rounds", type=int, default=rounds)

    def add_rate(self, rate: str | None, of: str = "each host's link") -> None:
        where = "" if rate else "; default: one host"
        self.add_argument("--rate", type=usage(_rate), default=rate, help=f"of {of}{where}")

    def add_sizes(self, of: str | Iterable[int]) -> None:
        sizes = of if isinstance(of, str) else ",".join(map(str, of))
        example = f"in bytes, such as {sizes}"
        self.add_argument("--sizes", type=usage(parse_sizes), default=sizes, help=example)

    def add_record(self) -> None:
        self.add_argument("--json", type=Path, metavar="FILE")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Reads the command line; refuses it if the build is not optimised."""
        options = self.parse_args(arguments)
        try:
            if not options.allow_debug:
                refuse_debug_build()
        except ConfigError as error:
            self.error(str(error))
        return options


def _rate(text: str) -> str:
    parse_rate(text)
    return text


def print_surroundings(*peers: str) -> None:
    """The first line: when, where and with what; ``peers`` as of `gradring bench`."""
    control = resources.congestion_control()
    print(f"# {resources.date()}, {resources.machine()}, load {resources.load()}, {control}")
    print(f"# {versions(peers)}")


def write(record: Path | None, rows: Iterable[Any]) -> None:
    """Writes rows, which are dataclasses, if there is to be a record."""
    if record is not None:
        record.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def in_turns(
    comm: gradring.Communicator,
    kinds: Mapping[str, Step],
    rounds: int,
    steps: int = 1,
    *,
    warm_ups: int = 0,
) -> dict[str, NDArray[Any]]:
    """Seconds of each step, `[rounds, steps]`, by kind; a round begins each kind at a barrier."""

    def seconds(step: Step, steps: int) -> NDArray[Any]:
        comm.barrier()
        if step is None:
            return np.zeros(steps)
        ends = [time.perf_counter()]
        for _ in range(steps):
            step()
            ends.append(time.perf_counter())
        return np.diff(ends)

    for step in kinds.values():
        seconds(step, warm_ups)
    measured = [[seconds(step, steps) for step in kinds.values()] for _ in range(rounds)]
    return dict(zip(kinds, np.stack(measured, axis=1), strict=True))


def repeated(once: Callable[[], object], times: int) -> Callable[[], None]:
    """A step of so many calls."""

    def repeat() -> None:
        for _ in range(times):
            once()

    return repeat


def slowest(ranks: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """By kind of step: of what each rank has measured, the longest."""
    return {kind: np.max([rank[kind] for rank in ranks], axis=0) for kind in ranks[0]}
