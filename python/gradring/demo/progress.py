"""The live line: one that is rewritten on a terminal, some plain ones elsewhere."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from typing import TextIO

PLAIN_S = 2.0
"""Time between two lines where they cannot be rewritten, such as in the log of a CI job."""
BAR_WIDTH = 20
_LINE = re.compile(
    r"\[(?P<rank>\d+)\] epoch (?P<epoch>\d+)/(?P<epochs>\d+) step (?P<step>\d+) "
    r"loss (?P<loss>\S+) (?P<rate>\d+) samples/s"
)


@dataclass(frozen=True)
class State:
    """What a rank said last."""

    epoch: int
    epochs: int
    step: int
    loss: float
    samples_per_s: int


class Progress:
    """Shows how far the ranks of one training are."""

    def __init__(self, title: str, world_size: int, stream: TextIO, unicode: bool) -> None:
        """Prepares the line and shows that TensorFlow is being started.

        Args:
            title: Name of the training, at the start of each line.
            world_size: Number of ranks.
            stream: Where to write.
            unicode: Whether the stream can show block characters.
        """
        self._title = title
        self._world_size = world_size
        self._stream = stream
        self._full, self._empty = ("█", "░") if unicode else ("#", ".")
        self._terminal = stream.isatty()
        self._ranks: dict[int, State] = {}
        self._shown_s = time.monotonic()
        self._show(f"{title:<20} starting {world_size} x TensorFlow")

    def feed(self, line: str) -> None:
        """Takes a line that the launcher printed; only lines of progress count."""
        match = _LINE.match(line)
        if match is None:
            return
        self._ranks[int(match["rank"])] = State(
            epoch=int(match["epoch"]),
            epochs=int(match["epochs"]),
            step=int(match["step"]),
            loss=float(match["loss"]),
            samples_per_s=int(match["rate"]),
        )
        now = time.monotonic()
        if self._terminal or now - self._shown_s >= PLAIN_S:
            self._shown_s = now
            self._show(self.text())

    def text(self) -> str:
        """The line for the present state; at least one rank has said something."""
        newest = max(self._ranks.values(), key=lambda state: state.step)
        done = BAR_WIDTH * newest.epoch // newest.epochs
        bar = self._full * done + self._empty * (BAR_WIDTH - done)
        rates = [
            f"rank {rank} {state.samples_per_s:,}/s" for rank, state in sorted(self._ranks.items())
        ]
        return (
            f"{self._title:<20} {bar} epoch {newest.epoch}/{newest.epochs} step {newest.step} "
            f"loss {newest.loss:.4f} | {' | '.join(rates)}"
        )

    def finish(self, text: str) -> None:
        """Replaces the line by a last one."""
        self._show(f"{self._title:<20} {text}")
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _show(self, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[2K{text[:width]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
