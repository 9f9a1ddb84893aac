"""The monitor of training steps: lines on the use of time, and a table at the end.

Steps are not measured one by one. The communicator counts continuously, and a line shows the
increase since the last line, divided by the number of steps. So a step costs only two readings of a
clock.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from gradring.config import parse
from gradring.errors import ConfigError
from gradring.group import steps
from gradring.group.communicator import Communicator, at_new_group, core_of
from gradring.observe import step_report, update_report
from gradring.observe.observer import observer_of, serve_metrics
from gradring.observe.step_report import Totals

if TYPE_CHECKING:
    from gradring.observe.step_log import StepLog

#: Numbers, or objects that ``float`` accepts, by name; or a function that returns these.
Metrics: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"

#: Interval between two status messages to the other ranks.
NOTE_S = 1.0
#: Longest wait of `Monitor.finish` for the other ranks' last numbers.
FAREWELL_S = 2.0
POLL_S = 0.02


class Monitor:
    """Prints on rank 0 how the time of training steps is used, and the slowest rank.

    A line looks like
    ``step 1200 | 41 ms = compute 28 + comm 9 + wait 4 | 12.4k samples/s | slowest: rank 2 ...``.
    ``comm`` is the time of moving bytes, and ``wait`` the time of waiting for other ranks. Both
    count only while the program was blocked; ``compute`` is all other time. ``input`` is the time
    measured by `input` and the program's waits for a strategy's distributed datasets; a line shows
    it if it is more than 5 % of a step. The rank named is the one for which others waited longest,
    minus its own waits.

    Every rank makes a monitor and calls `step`. The calls are not collectives: numbers are sent in
    the background, and a rank without a monitor is only missing in the table.

    Examples:
        >>> with gradring.Monitor(comm, samples_per_step=64, every_steps=2) as monitor:
        ...     for step in range(3):
        ...         with monitor.input():
        ...             batch = np.full(32, rank + step, np.float32)
        ...         loss = comm.all_reduce(float(batch.mean()), op="mean")
        ...         monitor.step(loss=loss)
        step 3 | ... ms = compute ... + comm ... + wait ... | ... samples/s | loss 2.5 | ...
        rank  host  steps  step ms  compute  input  comm  wait  others waited
           0  ...
           1  ...

        >>> monitor = gradring.Monitor(comm)
        >>> for step in range(3):
        ...     x = comm.all_reduce(np.ones(3, np.float32))
        ...     monitor.step(loss=1 / (step + 1))
        >>> monitor.pause()
        >>> accuracy = comm.all_reduce(0.5 + 0.25 * rank, op="mean")  # an evaluation
        >>> monitor.resume()
        >>> monitor.totals.steps, monitor.loss  # the first step does not count: it builds graphs
        (2, 0.333...)
        >>> table = monitor.finish()
        rank  host  ...
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
        prometheus_address: str | None = None,
        first_step: int = 0,
    ) -> None:
        """Starts to measure after the first step, which is left out because it builds graphs.

        Args:
            of: A `Communicator`, or a strategy that has one.
            samples_per_step: Number of samples of all ranks in a step. None: lines show steps per
                second.
            every_steps: Longest interval between two lines in steps.
            every_s: Longest interval between two lines in seconds.
            stream: Output of rank 0; default standard output.
            log: A file to which rank 0 appends a line of JSON with every line; its fields are those
                of `step_report.Interval.row`. At 16 MiB the file is renamed to ``NAME.1``, which
                replaces an older one, and a new file begins. If the file cannot be written, the
                training continues with a warning. Default: ``steps.jsonl`` in ``GRADRING_LOG_DIR``,
                which ``gradring run --log-dir`` sets, or no file.
            on_line: Called on rank 0 with the fields of each line, as a dict.
            prometheus_port: Port of the metrics server, plus the local rank; as the variable
                ``GRADRING_PROMETHEUS_PORT``.
            prometheus_address: IP address or network interface of the metrics server; default
                ``GRADRING_PROMETHEUS_ADDRESS``, or 127.0.0.1.
            first_step: Number of earlier steps, for example before a restart from a checkpoint; the
                numbers of steps continue from it.

        Raises:
            ConfigError: ``of`` has no communicator, an interval is not a number above 0,
                ``prometheus_port`` is not a port, or ``prometheus_address`` is not an address.
        """
        communicator = of if isinstance(of, Communicator) else getattr(of, "communicator", None)
        if not isinstance(communicator, Communicator):
            raise ConfigError(
                f"Monitor needs a gradring.Communicator or a CustomCollectiveStrategy, not {of!r}"
            )
        every_steps = parse.integer(every_steps, "every_steps", minimum=1)
        every_s = parse.seconds(every_s, "every_s")
        if prometheus_port is not None:
            prometheus_port = parse.integer(
                prometheus_port, "prometheus_port", minimum=1, maximum=parse.MAX_PORT
            )
        if prometheus_address is not None:
            from gradring.machine.interfaces import address_of  # most programs need none

            prometheus_address = address_of(prometheus_address, "prometheus_address")
        observer = observer_of(communicator)
        self._communicator = communicator
        self._observer = observer
        self._samples_per_step = samples_per_step
        self._every_steps = every_steps
        self._every_s = every_s
        self._stream = stream or sys.stdout
        self._on_line = on_line
        self._log: StepLog | None = None
        if communicator.rank == 0 and (log is not None or observer.log_dir is not None):
            from gradring.observe import step_log  # most programs write none

            directory = observer.log_dir or Path()
            self._log = step_log.opened(directory / step_log.NAME if log is None else Path(log))
        watch = getattr(of, "_input_clock", None)
        self._input_clock: Callable[[], float] = watch() if watch is not None else lambda: 0.0
        self._input_s = 0.0
        self._total = Totals()
        self._loss: Any = None
        self._metrics: Metrics | None = None
        self._shown = Totals()
        self._shown_ranks: dict[int, Totals] = {}
        self._first_late: dict[int, float] = {}
        #: Last status message of an earlier monitor on each rank, which must be ignored.
        self._earlier = {
            rank: note
            for rank, note in self._notes().items()
            if (total := Totals.from_note(note)) is not None and total.ended and total.steps
        }
        self._step = first_step
        self._has_begun = False
        self._since: tuple[float, ...] | None = None
        #: Number of collectives before the current step; None between steps.
        self._launched: int | None = core_of(communicator).launched
        self._line_at = self._note_at = float("inf")
        self._finished = False
        me = weakref.ref(self)
        observer.counted = lambda: None if (m := me()) is None else (m.totals, m.loss)
        at_new_group(communicator, self._begin_anew)
        if prometheus_port is not None:
            serve_metrics(communicator, prometheus_port, prometheus_address)

    @property
    def totals(self) -> Totals:
        """This rank's totals; updated about once a second."""
        return self._total

    @property
    def loss(self) -> float | None:
        """The last loss passed to `step`."""
        return None if self._loss is None else float(self._loss)

    def step(self, steps: int = 1, *, loss: Any = None, metrics: Metrics | None = None) -> None:
        """Records that `steps` steps have ended since the last call.

        Args:
            steps: Number of steps.
            loss: Loss for lines and logs: a number, or an object that ``float`` accepts, such as a
                scalar tensor. It is read only when a line is due.
            metrics: Metrics of this rank's own batch before any reduction, such as loss, accuracy
                or ``gradient_norm``: at most 6, with names of at most 32 characters. Values are
                numbers as for `loss`; or pass a function that returns the dict. They are read about
                once a second. The table, the log and TensorBoard show them for each rank. Lines and
                the table name a rank with an unusual ``gradient_norm``: not finite, or, among at
                least three ranks, above 10 times or below a tenth of the median.

        Raises:
            ConfigError: There are too many metrics, or a name is invalid.
            TypeError: A metric is not a number.
        """
        self._step += steps
        self._launched = core_of(self._communicator).launched
        if loss is not None:
            self._loss = loss
        if metrics is not None:
            self._metrics = metrics
        if not self._has_begun:
            self._has_begun = True
            self.resume()
            self._first_late = core_of(self._communicator).stats()["lateness_s"]
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
        """Measures the block as reading data: ``with monitor.input(): batch = next(batches)``.

        A `CustomCollectiveStrategy` measures the datasets that it distributes itself.
        """
        before = self._read(time.perf_counter())
        try:
            yield
        finally:
            elapsed, exposed, *_, counted = _added(self._read(time.perf_counter()), before)
            self._input_s += max(0.0, elapsed - exposed - counted)

    def pause(self) -> None:
        """Stops measuring, for example during an evaluation, until `resume` or `step` is called."""
        self._launched = None
        if self._since is not None:
            self._look(time.perf_counter())
            self._since = None

    def resume(self) -> None:
        """Starts measuring again after `pause`."""
        if self._launched is None:
            self._launched = core_of(self._communicator).launched
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
        hosts, worker = self._communicator.hosts, self._observer.worker
        text = step_report.table(self._all_totals(), hosts, worker)
        self._print(text)
        return text

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.finish()
        elif self._launched is not None and steps.ends_the_group(error):
            launched = core_of(self._communicator).launched - self._launched
            if launched:
                what = f"its step after {self._step}"
                steps.abort(self._communicator, what, launched, steps.described(error))

    def _begin_anew(self, _: Communicator) -> None:
        """Resets the baselines: the next group counts from 0 and can have other ranks."""
        self._since = None
        self._launched = 0
        self._first_late, self._shown_ranks = {}, {}

    def _read(self, now: float) -> tuple[float, ...]:
        stats = core_of(self._communicator).stats()
        self._total.late_s = {
            rank: seconds - self._first_late.get(rank, 0.0)
            for rank, seconds in stats["lateness_s"].items()
        }
        reading = self._input_s + self._input_clock()
        pulling = self._observer.updates().get("waited_s", 0.0)
        exposed, waiting = stats["exposed_s"] + pulling, stats["waiting_s"] + pulling
        made = self._observer.input_made_s
        return now, exposed, waiting, stats["moving_s"], made() if made else 0.0, reading

    def _look(self, now: float) -> None:
        """Adds the times since the last call to the totals."""
        if self._since is None:
            return
        self._look_at_metrics()
        after = self._read(now)
        elapsed, exposed, waiting, moving, made, reading = _added(after, self._since)
        self._since = after
        exposed = min(exposed, elapsed)
        # Divides the time in which the program was blocked like the time of the collectives.
        share = waiting / (waiting + moving) if waiting + moving > 0 else 0.0
        self._total.elapsed_s += elapsed
        self._total.wait_s += exposed * share
        self._total.comm_s += exposed * (1 - share)
        # TensorFlow can read ahead in one thread while another waits for a collective.
        self._total.input_s += min(reading, elapsed - exposed)
        self._total.made_s += made

    def _look_at_metrics(self) -> None:
        metrics, self._metrics = self._metrics, None
        if metrics is None:
            return
        try:
            found = metrics() if callable(metrics) else metrics
            self._total.metrics = step_report.checked_metrics(found)
        except ValueError as error:
            raise ConfigError(f"Monitor.step: metrics: {error}; leave it out") from None

    def _note(self, *, now: bool) -> None:
        core_of(self._communicator).note(self._total.to_note(), now)

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
        interval = step_report.Interval(
            self._step,
            added,
            since,
            self._communicator.hosts,
            self._samples_per_step,
            self.loss,
            self._observer.worker,
            update_report.facts(self._observer.updates()),
        )
        self._print(interval.line())
        if self._log is None and self._on_line is None:
            return
        facts = interval.row()
        if self._log is not None:
            self._log.write(facts)
        if self._on_line is not None:
            self._on_line(facts)

    def _print(self, text: str) -> None:
        """Prints; a full disk or a closed stream must not end the training."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def _notes(self) -> dict[int, bytes]:
        return {gossip["rank"]: gossip["note"] for gossip in core_of(self._communicator).gossip()}

    def _all_totals(self) -> dict[int, Totals]:
        notes = self._notes().items()
        totals = {
            rank: Totals.from_note(note) for rank, note in notes if note != self._earlier.get(rank)
        }
        totals[self._communicator.rank] = self._total
        return {rank: total for rank, total in sorted(totals.items()) if total is not None}


def _added(after: Sequence[float], before: Sequence[float]) -> list[float]:
    return [new - old for new, old in zip(after, before, strict=True)]
