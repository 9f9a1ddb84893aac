"""What one training process measures, prints while it trains, and leaves behind.

Clocks and counters are read before and after each step. The communicator counts how long its
collectives waited for the other ranks to enter and how long they then moved bytes; the TensorFlow
ops count how long a step stood still for them, which is less when communication is hidden behind
the backward pass.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradring import _native

PROGRESS_S = 0.25
"""Time between two lines of progress: often enough to look alive, too rare to slow a step down."""


@dataclass
class Record:
    """One step: the loss of its global batch, and times in seconds."""

    loss: float = float("nan")
    duration_s: float = 0.0
    blocked_s: float = 0.0
    waiting_s: float = 0.0
    moving_s: float = 0.0


@dataclass(frozen=True)
class Counters:
    """What has been counted since the process started, in seconds."""

    blocked_s: float = 0.0
    waiting_s: float = 0.0
    moving_s: float = 0.0


@dataclass
class Recorder:
    """Everything about one process of a training."""

    strategy: Any
    model: Any
    global_batch: int
    epochs: int
    records: list[Record] = field(default_factory=list)
    local_s: list[list[float]] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    printed_s: float = 0.0

    @contextmanager
    def step(self) -> Iterator[Record]:
        """Measures the block as one step; the block sets the record's loss."""
        record, before, start_s = Record(), self._counters(), time.perf_counter()
        yield record
        record.duration_s = time.perf_counter() - start_s
        after = self._counters()
        record.blocked_s = after.blocked_s - before.blocked_s
        record.waiting_s = after.waiting_s - before.waiting_s
        record.moving_s = after.moving_s - before.moving_s
        self.records.append(record)
        self._print_progress(time.perf_counter())

    @contextmanager
    def local_step(self) -> Iterator[None]:
        """Measures the block as a step of this rank alone."""
        start_s = time.perf_counter()
        yield
        self.local_s[-1].append(time.perf_counter() - start_s)

    def end_epoch(self, accuracy: float) -> None:
        """Notes the test accuracy; local steps that follow belong to the same epoch."""
        self.accuracies.append(accuracy)
        self.local_s.append([])

    def save(self, directory: Path) -> None:
        """Writes ``rank-R.json`` and ``rank-R.npz``."""
        directory.mkdir(parents=True, exist_ok=True)
        measured = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "replicas": self.strategy.num_replicas_in_sync,
            "global_batch": self.global_batch,
            "steps_per_epoch": len(self.records) // self.epochs,
            "steps": [vars(record) for record in self.records],
            "local_s": self.local_s,
            "accuracies": self.accuracies,
        }
        weights = [np.array(variable) for variable in self.model.variables]
        np.savez(directory / f"rank-{self._rank}.npz", *weights)
        (directory / f"rank-{self._rank}.json").write_text(json.dumps(measured))

    @property
    def _rank(self) -> int:
        resolver = self.strategy.cluster_resolver
        return 0 if resolver is None else int(resolver.task_id)

    def _counters(self) -> Counters:
        communicator = getattr(self.strategy, "communicator", None)
        if communicator is None:
            return Counters()
        stats = communicator.stats()
        blocked_s = _native.tensorflow_counters()["blocked_ns"] * 1e-9
        return Counters(blocked_s, stats["waiting_s"], stats["moving_s"])

    def _print_progress(self, now_s: float) -> None:
        if now_s - self.printed_s < PROGRESS_S:
            return
        self.printed_s = now_s
        record, done = self.records[-1], len(self.records)
        rate = self.global_batch / self.strategy.num_replicas_in_sync / record.duration_s
        epoch = len(self.accuracies) + 1
        print(
            f"epoch {epoch}/{self.epochs} step {done} loss {record.loss:.4f} {rate:.0f} samples/s",
            flush=True,
        )
