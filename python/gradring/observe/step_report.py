"""Counters of a `gradring.Monitor`, and its reports: lines, JSON, a table, a verdict."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradring.observe import update_report
from gradring.records import lateness

#: Largest number of peers in a status message, with this rank's waits for them.
LATE_MAX = 8
#: A rank is called slow if the others wait for it for this fraction of a step.
NOTICEABLE = 0.05
#: Parts of a step's time.
PARTS = ("compute", "input", "comm", "wait")
#: Limits of a rank's metrics, which are sent to the other ranks: number, length of a name.
METRICS_MAX = 6
METRIC_NAME_MAX = 32
#: Name of the metric for the norm of a rank's gradient before the reduction.
GRADIENT_NORM = "gradient_norm"
#: A gradient is unusual if its norm differs from the median of all ranks by this factor.
UNUSUAL = 10.0
#: Fields of `Totals` that are sums in seconds.
_TIMES = ("elapsed_s", "comm_s", "wait_s", "input_s", "made_s")


@dataclass
class Totals:
    """Steps, times in seconds and metrics of one rank while it was measured."""

    steps: int = 0
    elapsed_s: float = 0.0
    #: Exposed communication and exposed waiting, as docs/observability.md defines them.
    comm_s: float = 0.0
    wait_s: float = 0.0
    #: This rank's waits for each rank that was the last to enter a collective.
    late_s: dict[int, float] = field(default_factory=dict)
    ended: bool = False
    #: Time blocked by waits for the next batch.
    input_s: float = 0.0
    #: Time in which input workers made this rank's data.
    made_s: float = 0.0
    #: Last metrics of the rank's own batch, by name.
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """All time that is not communication, waiting or input."""
        return max(0.0, self.elapsed_s - self.comm_s - self.wait_s - self.input_s)

    def ms(self, seconds: float) -> float:
        """Converts a total in seconds to milliseconds per step."""
        return 1000 * seconds / max(1, self.steps)

    def minus(self, other: Totals) -> Totals:
        """Returns the increase since ``other``."""
        # A status message has the longest waits only; the others were at most the shortest listed.
        complete = len(other.late_s) < LATE_MAX
        unlisted = 0.0 if complete else min(other.late_s.values())
        late_s = {
            rank: max(0.0, late - other.late_s.get(rank, unlisted))
            for rank, late in self.late_s.items()
        }
        times = {name: getattr(self, name) - getattr(other, name) for name in _TIMES}
        return Totals(self.steps - other.steps, **times, late_s=late_s, metrics=self.metrics)

    def to_note(self) -> bytes:
        """Encodes the totals for the other ranks, with the longest waits only."""
        longest = sorted(self.late_s.items(), key=lambda item: -item[1])[:LATE_MAX]
        metrics = {name: float(f"{value:.6g}") for name, value in self.metrics.items()}
        row = {**asdict(self), "late_s": dict(longest), "metrics": metrics}
        return json.dumps(row).encode()

    @classmethod
    def from_note(cls, note: bytes) -> Totals | None:
        """Decodes the result of `to_note`; returns None for a rank without a monitor."""
        try:
            row = json.loads(note)
            times = {name: float(row[name]) for name in _TIMES}
            late_s = {int(rank): float(seconds) for rank, seconds in row["late_s"].items()}
            metrics = checked_metrics(row["metrics"])
            ended = bool(row["ended"])
            return cls(int(row["steps"]), **times, late_s=late_s, ended=ended, metrics=metrics)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


def checked_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Returns metrics as plain numbers by name.

    Raises:
        ValueError: There are more than `METRICS_MAX` metrics, or a name is invalid or too long.
        TypeError: A metric is not a number.
    """
    if len(metrics) > METRICS_MAX:
        raise ValueError(f"{len(metrics)} metrics are more than {METRICS_MAX}")
    for name in metrics:
        is_name = isinstance(name, str) and name.isascii() and name.isprintable()
        if not is_name or not 0 < len(name) <= METRIC_NAME_MAX:
            raise ValueError(f"{name!r} is no name of 1 to {METRIC_NAME_MAX} printable characters")
    return {name: float(value) for name, value in metrics.items()}


def per_step(totals: Totals) -> dict[int, float]:
    """Returns this rank's wait for each other rank, in seconds per step."""
    return {rank: late / max(1, totals.steps) for rank, late in totals.late_s.items()}


@dataclass(frozen=True)
class Interval:
    """The steps since the last line, as known on rank 0."""

    #: Steps since the start.
    step: int
    #: Increase of the totals on this rank, and on each rank by its status messages.
    added: Totals
    since: dict[int, Totals]
    #: Host of each rank.
    hosts: list[str]
    #: Samples of all ranks in a step, and the loss; None if unknown.
    samples_per_step: int | None = None
    loss: float | None = None
    #: Number of this worker of parameter servers, and the result of `update_report.facts`.
    worker: int | None = None
    updates: dict[str, float | None] | None = None

    @property
    def steps_per_s(self) -> float:
        """Steps per second."""
        return self.added.steps / self.added.elapsed_s if self.added.elapsed_s > 0 else 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None if unknown."""
        if self.samples_per_step is None:
            return None
        return self.steps_per_s * self.samples_per_step

    def line(self) -> str:
        """Returns one line for people; a small ``input`` is included in ``compute``."""
        added, loss = self.added, self.loss
        reads = added.input_s > NOTICEABLE * added.elapsed_s
        times = {
            "compute": added.compute_s + (0.0 if reads else added.input_s),
            **({"input": added.input_s} if reads else {}),
            "comm": added.comm_s,
            "wait": added.wait_s,
        }
        parts = " + ".join(f"{name} {_short(added.ms(seconds))}" for name, seconds in times.items())
        samples = self.samples_per_s
        speed = f"{self.steps_per_s:.3g} steps/s"
        if samples is not None:
            speed = f"{_thousands(samples)} samples/s"
        if loss is not None:
            speed += f" | loss {loss:.4g}"
        found = _straggler(added, self._waits(), self.hosts)
        slow = "no rank is slow"
        if found is not None:
            skew = _short(1000 * found.skew_s)
            slow = f"slowest: rank {found.rank} {self.hosts[found.rank]} +{skew} ms"
            slow += " (input)" if _reads_slowly(found, self.since) else ""
        if self.updates is not None:
            # A worker has no other ranks to compare with.
            slow = update_report.words(self.updates)
        for rank, norm, median in unusual(self.since):
            slow += f" | gradient of rank {rank} has norm {norm:.3g}"
            slow += "" if median is None else f", the median is {median:.3g}"
        step = f"step {self.step} | {_short(added.ms(added.elapsed_s))} ms"
        return f"{step} = {parts} | {speed} | {slow}"

    def row(self) -> dict[str, Any]:
        """Returns the facts of the line, and of every rank, as a dict for programs.

        Returns:
            ``time_s`` since 1970, ``attempt`` (of ``gradring run --max-restarts``, from 0),
            ``step``, ``steps_per_s``, ``samples_per_s``, ``loss``, ``slowest``, ``ranks`` and
            ``updates``. Samples and loss are None if unknown. ``slowest`` is None, or has ``rank``,
            ``host`` and ``excess_ms`` of a step. ``ranks`` has for each rank, as text, ``step_ms``,
            ``compute_ms``, ``input_ms``, ``comm_ms``, ``wait_ms``, ``made_wait_ms`` (the others'
            waits for it), and the metrics of its own batches by name. ``updates`` is the result of
            `update_report.facts` on a worker of parameter servers, else None. Numbers that are not
            finite are text.
        """
        waits, loss = self._waits(), self.loss
        found = _straggler(self.added, waits, self.hosts)
        return {
            "time_s": round(time.time(), 3),
            "attempt": int(os.environ.get("GRADRING_RESTART") or 0),
            "step": self.step,
            "steps_per_s": self.steps_per_s,
            "samples_per_s": self.samples_per_s,
            "loss": loss if loss is None else _for_json(loss),
            "slowest": found
            and {
                "rank": found.rank,
                "host": self.hosts[found.rank],
                "excess_ms": 1000 * found.skew_s,
            },
            "updates": self.updates,
            "ranks": {
                str(rank if self.worker is None else self.worker): {
                    "step_ms": totals.ms(totals.elapsed_s),
                    **{f"{part}_ms": totals.ms(getattr(totals, f"{part}_s")) for part in PARTS},
                    "made_wait_ms": 1000 * lateness.made_wait_s(waits, rank),
                    **{name: _for_json(value) for name, value in totals.metrics.items()},
                }
                for rank, totals in self.since.items()
            },
        }

    def _waits(self) -> lateness.Waits:
        return {rank: per_step(totals) for rank, totals in self.since.items()}


def table(totals: dict[int, Totals], hosts: list[str], worker: int | None = None) -> str:
    """Returns a table with a row for each rank or worker, and a verdict in one sentence.

    Times are milliseconds of an average step; metrics are the last ones of each rank.
    """
    names = list(dict.fromkeys(name for total in totals.values() for name in total.metrics))
    words = (name.replace("_", " ") for name in names)
    header = ("rank", "host", "steps", "step ms", *PARTS, "others waited", *words)
    rows: list[tuple[str, ...]] = [header]
    waits = {rank: per_step(total) for rank, total in totals.items()}
    for rank, total in totals.items():
        made = 1000 * lateness.made_wait_s(waits, rank)
        times = (total.elapsed_s, *(getattr(total, f"{part}_s") for part in PARTS))
        cells = (f"{total.ms(seconds):.1f}" for seconds in times)
        metrics = (f"{total.metrics[name]:.4g}" if name in total.metrics else "" for name in names)
        who = str(rank if worker is None else worker)
        rows.append((who, hosts[rank], str(total.steps), *cells, f"{made:.1f}", *metrics))
    missing = [rank for rank in range(len(hosts)) if rank not in totals]
    rows += [(str(rank), hosts[rank], "no monitor", *[""] * (6 + len(names))) for rank in missing]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    norms = [
        f"The gradient of rank {rank} on {hosts[rank]} has norm {norm:.3g}"
        + ("" if median is None else f", and the median is {median:.3g}")
        + ": look at its data."
        for rank, norm, median in unusual(totals)
    ]
    said = verdict(totals, waits, hosts)
    if worker is not None:
        mean = _mean(totals)
        share = mean.wait_s / mean.elapsed_s
        said = f"Worker {worker} is in pulls, and waits for servers, {share:.0%} of its time."
    return "\n".join([*lines, said, *_input_workers(totals), *norms])


def unusual(totals: Mapping[int, Totals]) -> list[tuple[int, float, float | None]]:
    """Returns ranks whose gradient norms differ much from the others'.

    Returns:
        Rank, norm, and the median over all ranks, which is None if the norm is not finite. Finite
        norms are compared only if there are at least three.
    """
    norms = {rank: total.metrics.get(GRADIENT_NORM) for rank, total in totals.items()}
    known = {rank: norm for rank, norm in norms.items() if norm is not None}
    finite = {rank: norm for rank, norm in known.items() if math.isfinite(norm)}
    found: list[tuple[int, float, float | None]] = []
    median = statistics.median_low(finite.values()) if len(finite) > 2 else None
    for rank, norm in known.items():
        if rank not in finite:
            found.append((rank, norm, None))
        elif median is not None and not median / UNUSUAL <= norm <= median * UNUSUAL:
            found.append((rank, norm, median))
    return found


def verdict(totals: dict[int, Totals], waits: lateness.Waits, hosts: list[str]) -> str:
    """Returns one sentence on the bottleneck of the steps."""
    mean = _mean(totals)
    found = _straggler(mean, waits, hosts)
    if found is not None:
        share = found.skew_s * mean.steps / mean.elapsed_s
        own, reads = totals.get(found.rank, Totals()), _reads_slowly(found, totals)
        remedy = "" if own.made_s > 0 else ", which gradring run --input-workers would share out"
        return (
            f"Rank {found.rank} on {hosts[found.rank]} is the slowest: the others waited "
            f"{1000 * found.skew_s:.1f} ms of each step for it, {share:.0%} of the time"
            + (
                f"; its input takes {own.ms(own.input_s):.1f} ms of a step{remedy}."
                if reads
                else "."
            )
        )
    parts = (mean.comm_s, mean.wait_s, mean.input_s)
    comm, wait, reading = (seconds / mean.elapsed_s for seconds in parts)
    if comm >= wait and comm > 2 * NOTICEABLE:
        return (
            f"No rank is slow; {comm:.0%} of the time goes into moving bytes that no computation "
            "hides: larger batches or wire_dtype='bfloat16' would help."
        )
    if wait > 2 * NOTICEABLE:
        return (
            f"No rank is always the slowest, but {wait:.0%} of the time is spent waiting for one "
            "or another: steps take unequal times, or other programs use the machines."
        )
    if reading > 2 * NOTICEABLE:
        remedy = (
            "more input workers would help"
            if mean.made_s > 0
            else "a dataset that prefetches, more threads for it, or input workers would help "
            "(gradring run --input-workers)"
        )
        return f"No rank is slow; {reading:.0%} of the time is spent reading data: {remedy}."
    computing = 1 - comm - wait - reading
    return f"No rank is slow, and {computing:.0%} of the time is spent computing."


def _input_workers(totals: Mapping[int, Totals]) -> list[str]:
    """Returns a sentence on the input workers' time for a step, and a rank's wait for the data."""
    made_ms = sum(total.ms(total.made_s) for total in totals.values())
    if made_ms <= 0:
        return []
    mean = _mean(dict(totals))
    waited_ms = mean.ms(mean.input_s)
    return [
        f"Input workers took {made_ms:.1f} ms for the data of a step; a rank waited "
        f"{waited_ms:.1f} ms for it."
    ]


def _straggler(added: Totals, waits: lateness.Waits, hosts: list[str]) -> lateness.Slowest | None:
    found = lateness.slowest(waits, range(len(hosts)))
    if found is None or found.skew_s * added.steps < NOTICEABLE * added.elapsed_s:
        return None
    return found


def _reads_slowly(found: lateness.Slowest, totals: dict[int, Totals]) -> bool:
    """Returns True if slower input explains more than half of the others' waits for a rank."""
    reading = {rank: total.input_s / max(1, total.steps) for rank, total in totals.items()}
    own = reading.get(found.rank, 0.0)
    return own - min(reading.values(), default=0.0) > found.skew_s / 2


def _mean(totals: dict[int, Totals]) -> Totals:
    rows = [total for total in totals.values() if total.steps]
    count = len(rows) or 1
    times = {name: sum(getattr(row, name) for row in rows) / count for name in _TIMES}
    times["elapsed_s"] = times["elapsed_s"] or 1e-9
    return Totals(max((row.steps for row in rows), default=1), **times)


def _for_json(number: float) -> float | str:
    """Returns a number that is not finite as text, since JSON has no NaN."""
    return number if math.isfinite(number) else str(number)


def _short(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"


def _thousands(number: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"
