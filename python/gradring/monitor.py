"""Where the time of training steps goes, while they run: a line now and then, a table at the end.

Steps are not measured one by one. The communicator counts all the time, and a line shows what has
been added since the last one, divided by the number of steps; so a step costs two looks at a clock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, TextIO

from gradring import lateness, steplog
from gradring.communicator import Communicator
from gradring.errors import ConfigError

#: Between two notes to the other ranks; they are sent about once a second.
NOTE_S = 1.0
#: How long the end may wait for the other ranks' last numbers.
FAREWELL_S = 2.0
POLL_S = 0.02
#: For so many peers a rank tells the others how long it waited.
LATE_MAX = 8
#: A rank is called slow when the others wait for it for so much of a step.
NOTICEABLE = 0.05


@dataclass
class Totals:
    """What one rank has done while it was measured; times in seconds."""

    steps: int = 0
    elapsed_s: float = 0.0
    #: In which the program stood still for collectives: moving bytes, and waiting for peers.
    comm_s: float = 0.0
    wait_s: float = 0.0
    #: By rank that was the last to enter: how long this rank waited for it.
    late_s: dict[int, float] = field(default_factory=dict)
    ended: bool = False
    #: In which it stood still for its next batch.
    input_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Everything else."""
        return max(0.0, self.elapsed_s - self.comm_s - self.wait_s - self.input_s)

    def ms(self, seconds: float) -> float:
        """Milliseconds of an average step."""
        return 1000 * seconds / max(1, self.steps)

    def minus(self, other: Totals) -> Totals:
        """What has come since ``other``."""
        # A note lists the longest waits only: what it leaves out was at most the shortest of them.
        complete = len(other.late_s) < LATE_MAX
        unlisted = 0.0 if complete else min(other.late_s.values())
        return Totals(
            self.steps - other.steps,
            self.elapsed_s - other.elapsed_s,
            self.comm_s - other.comm_s,
            self.wait_s - other.wait_s,
            {
                rank: max(0.0, late - other.late_s.get(rank, unlisted))
                for rank, late in self.late_s.items()
            },
            input_s=self.input_s - other.input_s,
        )

    def to_note(self) -> bytes:
        """As bytes for the other ranks: the longest waits only."""
        longest = sorted(self.late_s.items(), key=lambda item: -item[1])[:LATE_MAX]
        row = {**asdict(self), "late_s": dict(longest)}
        return json.dumps(row).encode()

    @classmethod
    def from_note(cls, note: bytes) -> Totals | None:
        """What `to_note` made; None for the note of a rank without a monitor."""
        try:
            row = json.loads(note)
            return cls(
                steps=int(row["steps"]),
                elapsed_s=float(row["elapsed_s"]),
                comm_s=float(row["comm_s"]),
                wait_s=float(row["wait_s"]),
                input_s=float(row["input_s"]),
                late_s={int(rank): float(seconds) for rank, seconds in row["late_s"].items()},
                ended=bool(row["ended"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


class Monitor:
    """Prints on rank 0 where the time of training steps goes, and who is slowest.

    ::

        with gradring.Monitor(comm, samples_per_step=512) as monitor:
            for batch in batches:
                train_step(batch)
                monitor.step()

        step 1200 | 41 ms = compute 28 + comm 9 + wait 4 | 12.4k samples/s | slowest: rank 2 ...

    ``comm`` is moving bytes and ``wait`` waiting for other ranks to come, both only as far as the
    program stood still meanwhile; ``compute`` is all other time. Time that `input` has measured,
    and what a strategy's distributed datasets kept the program waiting, is ``input`` instead; a
    line says so where it is 5 % of a step. The rank named is the one for which others waited, less
    what it waited itself.

    Every rank makes one and calls `step`, but they need not agree about when: numbers travel
    beside the collectives, and a rank without a monitor is only missing in the table.
    """

    def __init__(
        self,
        of: Any,
        *,
        samples_per_step: int | None = None,
        every_steps: int = 100,
        every_s: float = 10.0,
        stream: TextIO | None = None,
        log: str | os.PathLike[str] | None = None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        prometheus_port: int | None = None,
        first_step: int = 0,
    ) -> None:
        """Begins with the first step, which itself does not count: it builds graphs.

        Args:
            of: A `Communicator`, or a strategy that has one.
            samples_per_step: Of all ranks together; without it, lines tell steps per second.
            every_steps: A line comes after so many steps,
            every_s: or after so many seconds, whatever comes first.
            stream: Where rank 0 writes; default standard output.
            log: A file to which rank 0 appends a line of JSON with every line: `row` says what. At
                16 MiB it becomes ``NAME.1`` in place of the one before, and a new one begins.
                Default: ``steps.jsonl`` in ``GRADRING_LOG_DIR``, which ``gradring run --log-dir``
                sets, or none.
            on_line: Called on rank 0 with the same dict.
            prometheus_port: As the variable ``GRADRING_PROMETHEUS_PORT``: every rank serves its
                numbers at 127.0.0.1, at this port plus its local rank.
            first_step: How many steps were done before, as after a restart from a checkpoint; steps
                are numbered from there.

        Raises:
            ConfigError: ``of`` has no communicator, or an interval is not above 0.
            OSError: ``log`` cannot be written.
        """
        communicator = of if isinstance(of, Communicator) else getattr(of, "communicator", None)
        if not isinstance(communicator, Communicator):
            raise ConfigError(
                f"Monitor needs a gradring.Communicator or a CustomCollectiveStrategy, not {of!r}"
            )
        if every_steps < 1 or not every_s > 0:
            raise ConfigError(f"every_steps={every_steps} and every_s={every_s} must be above 0")
        self._communicator = communicator
        self._samples_per_step = samples_per_step
        self._every_steps = every_steps
        self._every_s = every_s
        self._stream = stream or sys.stdout
        self._on_line = on_line
        self._log: steplog.StepLog | None = None
        if communicator.rank == 0 and log is not None:
            self._log = steplog.StepLog(log)
        elif communicator.rank == 0 and communicator._log_dir is not None:
            self._log = steplog.in_directory(communicator._log_dir)
        watch = getattr(of, "_input_clock", None)
        self._input_clock: Callable[[], float] = watch() if watch is not None else lambda: 0.0
        self._input_s = 0.0
        self._total = Totals()
        self._loss: Any = None
        self._shown = Totals()
        self._shown_ranks: dict[int, Totals] = {}
        self._first_late: dict[int, float] = {}
        self._step = first_step
        self._has_begun = False
        self._since: tuple[float, ...] | None = None
        self._line_at = self._note_at = float("inf")
        self._finished = False
        communicator._monitor = weakref.ref(self)
        if prometheus_port is not None:
            communicator._serve_metrics(prometheus_port)

    @property
    def totals(self) -> Totals:
        """What this rank has done, up to a second ago."""
        return self._total

    @property
    def loss(self) -> float | None:
        """The loss that `step` was given last."""
        return None if self._loss is None else float(self._loss)

    def step(self, steps: int = 1, *, loss: Any = None) -> None:
        """So many steps have ended since the last call.

        Args:
            steps: How many.
            loss: Shown in lines and logs: a number, or what ``float`` makes one of, such as a
                scalar tensor, which is read only when a line is due.
        """
        self._step += steps
        if loss is not None:
            self._loss = loss
        if not self._has_begun:
            self._has_begun = True
            self.resume()
            self._first_late = self._communicator._native.stats()["lateness_s"]
            return
        if self._since is None:
            self.resume()
        self._total.steps += steps
        now = time.perf_counter()
        if now < self._note_at and self._total.steps - self._shown.steps < self._every_steps:
            return
        self._look(now)
        if now >= self._note_at:
            self._note_at = now + NOTE_S
            self._note(now=False)
        if now >= self._line_at or self._total.steps - self._shown.steps >= self._every_steps:
            self._show(now)

    @contextlib.contextmanager
    def input(self) -> Iterator[None]:
        """What happens inside is reading data: ``with monitor.input(): batch = next(batches)``.

        A `CustomCollectiveStrategy` does so itself for the datasets that it distributes.
        """
        before = self._read(time.perf_counter())
        try:
            yield
        finally:
            elapsed, exposed, *_, counted = _added(self._read(time.perf_counter()), before)
            self._input_s += max(0.0, elapsed - exposed - counted)

    def pause(self) -> None:
        """What follows, such as an evaluation, is no step; goes on with `resume` or `step`."""
        if self._since is not None:
            self._look(time.perf_counter())
            self._since = None

    def resume(self) -> None:
        """Steps follow again."""
        if self._since is not None or not self._has_begun:
            return
        now = time.perf_counter()
        if self._line_at == float("inf"):
            self._line_at, self._note_at = now + self._every_s, now
        self._since = self._read(now)

    def finish(self) -> str:
        """Prints and returns the table of all ranks and a verdict; empty on ranks other than 0.

        Waits up to two seconds for the last numbers of the other ranks.
        """
        if self._finished:
            return ""
        self._finished = True
        self.pause()
        self._total.ended = True
        self._note(now=True)
        deadline = time.monotonic() + FAREWELL_S
        ranks = self._communicator.world_size
        while time.monotonic() < deadline:
            totals = self._all_totals()
            if len(totals) == ranks and all(total.ended for total in totals.values()):
                break
            time.sleep(POLL_S)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._communicator.rank != 0 or self._total.steps == 0:
            return ""
        text = table(self._all_totals(), self._communicator.hosts)
        print(text, file=self._stream, flush=True)
        return text

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()

    def _read(self, now: float) -> tuple[float, ...]:
        stats = self._communicator._native.stats()
        self._total.late_s = {
            rank: seconds - self._first_late.get(rank, 0.0)
            for rank, seconds in stats["lateness_s"].items()
        }
        reading = self._input_s + self._input_clock()
        return now, stats["exposed_s"], stats["waiting_s"], stats["moving_s"], reading

    def _look(self, now: float) -> None:
        """Adds what has come since the last look."""
        if self._since is None:
            return
        after = self._read(now)
        elapsed, exposed, waiting, moving, reading = _added(after, self._since)
        self._since = after
        exposed = min(exposed, elapsed)
        # The program stood still for collectives: their own time tells what for.
        share = waiting / (waiting + moving) if waiting + moving > 0 else 0.0
        self._total.elapsed_s += elapsed
        self._total.wait_s += exposed * share
        self._total.comm_s += exposed * (1 - share)
        # TensorFlow may read ahead in one thread and wait for a collective in another.
        self._total.input_s += min(reading, elapsed - exposed)

    def _note(self, *, now: bool) -> None:
        self._communicator._native.note(self._total.to_note(), now)

    def _show(self, now: float) -> None:
        added = self._total.minus(self._shown)
        self._shown = Totals(**asdict(self._total))
        self._line_at = now + self._every_s
        if self._communicator.rank != 0:
            return
        ranks = self._all_totals()
        since = {
            rank: totals.minus(self._shown_ranks.get(rank, Totals()))
            for rank, totals in ranks.items()
        }
        self._shown_ranks = {rank: Totals(**asdict(totals)) for rank, totals in ranks.items()}
        loss = self.loss
        text = line(
            self._step, added, since, self._communicator.hosts, self._samples_per_step, loss
        )
        print(text, file=self._stream, flush=True)
        if self._log is None and self._on_line is None:
            return
        facts = row(
            self._step, added, since, self._communicator.hosts, self._samples_per_step, loss
        )
        if self._log is not None:
            self._log.write(facts)
        if self._on_line is not None:
            self._on_line(facts)

    def _all_totals(self) -> dict[int, Totals]:
        notes = {pulse["rank"]: pulse["note"] for pulse in self._communicator._native.pulses()}
        totals = {rank: Totals.from_note(note) for rank, note in notes.items()}
        totals[self._communicator.rank] = self._total
        return {rank: total for rank, total in sorted(totals.items()) if total is not None}


def _added(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [new - old for new, old in zip(after, before, strict=True)]


def per_step(totals: Totals) -> dict[int, float]:
    """By rank that was the last to enter: seconds that this rank waited for it in each step."""
    return {rank: late / max(1, totals.steps) for rank, late in totals.late_s.items()}


def line(
    step: int,
    added: Totals,
    since: dict[int, Totals],
    hosts: list[str],
    samples_per_step: int | None,
    loss: float | None = None,
) -> str:
    """One live line about the steps ``added`` since the last one, and ``since`` then on each rank.

    Input that is not worth a part of its own is part of ``compute``.
    """
    reads = added.input_s > NOTICEABLE * added.elapsed_s
    times = {
        "compute": added.compute_s + (0.0 if reads else added.input_s),
        **({"input": added.input_s} if reads else {}),
        "comm": added.comm_s,
        "wait": added.wait_s,
    }
    parts = " + ".join(f"{name} {_short(added.ms(seconds))}" for name, seconds in times.items())
    rate = added.steps / added.elapsed_s if added.elapsed_s > 0 else 0.0
    speed = f"{rate:.3g} steps/s"
    if samples_per_step is not None:
        speed = f"{_thousands(rate * samples_per_step)} samples/s"
    if loss is not None:
        speed += f" | loss {loss:.4g}"
    waits = {rank: per_step(totals) for rank, totals in since.items()}
    found = _straggler(added, waits, hosts)
    slow = "no rank is slow"
    if found is not None:
        excess = _short(1000 * found.excess_s)
        slow = f"slowest: rank {found.rank} {hosts[found.rank]} +{excess} ms"
        slow += " (input)" if _reads_slowly(found, since) else ""
    return f"step {step} | {_short(added.ms(added.elapsed_s))} ms = {parts} | {speed} | {slow}"


def row(
    step: int,
    added: Totals,
    since: dict[int, Totals],
    hosts: list[str],
    samples_per_step: int | None,
    loss: float | None = None,
) -> dict[str, Any]:
    """What a line says, and the same for every rank, as a dict for machines.

    Returns:
        ``time_s`` since 1970, ``attempt`` (of ``gradring run --max-restarts``, from 0), ``step``,
        ``steps_per_s``, ``samples_per_s`` and ``loss`` (None if unknown), ``slowest`` (None, or
        ``rank``, ``host`` and ``excess_ms`` of a step), and ``ranks``: by rank, as text,
        ``step_ms``, ``compute_ms``, ``input_ms``, ``comm_ms``, ``wait_ms`` and ``made_wait_ms``,
        which is how long others waited for it.
    """
    waits = {rank: per_step(totals) for rank, totals in since.items()}
    found = _straggler(added, waits, hosts)
    rate = added.steps / added.elapsed_s if added.elapsed_s > 0 else 0.0
    return {
        "time_s": round(time.time(), 3),
        "attempt": int(os.environ.get("GRADRING_RESTART") or 0),
        "step": step,
        "steps_per_s": rate,
        "samples_per_s": None if samples_per_step is None else rate * samples_per_step,
        # JSON has no NaN, and a loss that is none deserves a line that can be read.
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),
        "slowest": found
        and {
            "rank": found.rank,
            "host": hosts[found.rank],
            "excess_ms": 1000 * found.excess_s,
        },
        "ranks": {
            str(rank): {
                "step_ms": totals.ms(totals.elapsed_s),
                "compute_ms": totals.ms(totals.compute_s),
                "input_ms": totals.ms(totals.input_s),
                "comm_ms": totals.ms(totals.comm_s),
                "wait_ms": totals.ms(totals.wait_s),
                "made_wait_ms": 1000 * lateness.made_wait_s(waits, rank),
            }
            for rank, totals in since.items()
        },
    }


def table(totals: dict[int, Totals], hosts: list[str]) -> str:
    """A row for each rank, in milliseconds of an average step, and a verdict in a sentence."""
    parts = ("compute", "input", "comm", "wait")
    header = ("rank", "host", "steps", "step ms", *parts, "others waited")
    rows: list[tuple[str, ...]] = [header]
    waits = {rank: per_step(total) for rank, total in totals.items()}
    for rank, total in totals.items():
        made = 1000 * lateness.made_wait_s(waits, rank)
        times = (total.elapsed_s, *(getattr(total, f"{part}_s") for part in parts))
        cells = (f"{total.ms(seconds):.1f}" for seconds in times)
        rows.append((str(rank), hosts[rank], str(total.steps), *cells, f"{made:.1f}"))
    missing = [rank for rank in range(len(hosts)) if rank not in totals]
    rows += [(str(rank), hosts[rank], "no monitor", *[""] * 6) for rank in missing]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, verdict(totals, waits, hosts)])


def verdict(totals: dict[int, Totals], waits: lateness.Waits, hosts: list[str]) -> str:
    """What limits the steps, in one sentence."""
    mean = _mean(totals)
    found = _straggler(mean, waits, hosts)
    if found is not None:
        share = found.excess_s * mean.steps / mean.elapsed_s
        own, reads = totals.get(found.rank, Totals()), _reads_slowly(found, totals)
        return (
            f"Rank {found.rank} on {hosts[found.rank]} is the slowest: the others waited "
            f"{1000 * found.excess_s:.1f} ms of each step for it, {share:.0%} of the time"
            + (f"; its input takes {own.ms(own.input_s):.1f} ms of a step." if reads else ".")
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
        return (
            f"No rank is slow; {reading:.0%} of the time is spent reading data: a dataset that "
            "prefetches, or more threads for it, would help."
        )
    computing = 1 - comm - wait - reading
    return f"No rank is slow, and {computing:.0%} of the time is spent computing."


def _straggler(added: Totals, waits: lateness.Waits, hosts: list[str]) -> lateness.Slowest | None:
    found = lateness.slowest(waits, range(len(hosts)))
    if found is None or found.excess_s * added.steps < NOTICEABLE * added.elapsed_s:
        return None
    return found


def _reads_slowly(found: lateness.Slowest, totals: dict[int, Totals]) -> bool:
    """Whether most of what others wait for a rank is input that takes another rank less."""
    reading = {rank: total.input_s / max(1, total.steps) for rank, total in totals.items()}
    own = reading.get(found.rank, 0.0)
    return own - min(reading.values(), default=0.0) > found.excess_s / 2


def _mean(totals: dict[int, Totals]) -> Totals:
    rows = [total for total in totals.values() if total.steps]
    count = len(rows) or 1
    return Totals(
        steps=max((row.steps for row in rows), default=1),
        elapsed_s=sum(row.elapsed_s for row in rows) / count or 1e-9,
        comm_s=sum(row.comm_s for row in rows) / count,
        wait_s=sum(row.wait_s for row in rows) / count,
        input_s=sum(row.input_s for row in rows) / count,
    )


def _short(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"


def _thousands(number: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"
