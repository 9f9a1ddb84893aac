"""The run of a benchmark: starts the ranks and prints measurements as they arrive."""

from __future__ import annotations

import _thread
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from gradring.launch.processes import tied
from gradring.testing import run_ranks
from gradring.tools.bench import rank, table
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.network import AS_THE_SYSTEM, network
from gradring.tools.bench.options import Options
from gradring.tools.bench.record import Record

#: Time for the start of the ranks and of a slow peer's library.
START_UP_S = 120.0
#: Time limit of one size; all systems together normally take less than a minute.
SIZE_S = 600.0
#: Time for one iteration of all systems at the largest sizes.
ITERATION_S = 2.0
POLL_S = 0.2


def bench_all_reduce(options: Options, say: Callable[[str], None]) -> Record:
    """Measures by the options, with one new interpreter per rank on this machine.

    Args:
        options: The checked options.
        say: Called with each line of the report.

    Returns:
        The run, with one measurement per system and size, and one of the raw links at each size of
        4 MiB or more.

    Raises:
        RankFailure: A rank failed, or had not finished in time.
    """
    command = options.command()
    say(f"# {command}")
    options, reasons = options.measurable()
    for reason in reasons:
        say(f"# left out: {reason}")
    record = Record.begin(command, options.congestion, options.peers)
    say(f"# {record.date}, {record.machine}, load {record.load_at_start} at the start")
    say(f"# TCP congestion control {record.tcp_congestion_control}")
    say(f"# {record.versions}")
    say(f"# {options.world_size} ranks on {options.where()}; time of rank 0 after a barrier")
    say("# every result of every rank compared with the exact one, by element: column wrong")
    if options.disturb:
        say("# disturbed: one more process computes all the time")
    say(table.header())

    def show(measured: list[Measurement]) -> None:
        for line in table.rows(measured, options.op):
            say(line)

    with (
        network(options.congestion, options.hosts, options.rate) as hosts,
        disturbed(options.disturb),
        _following(show) as progress,
    ):
        record.measurements[:] = run_ranks(
            rank.measure,
            options.world_size,
            options,
            str(progress),
            timeout=_timeout_s(options),
            env=AS_THE_SYSTEM if options.congestion else None,
            hosts=[host for host in hosts for _ in range(options.ranks_per_host)],
        )[0]
    say("")
    for line in table.compared(record.measurements):
        say(line)
    return record


def _timeout_s(options: Options) -> float:
    iterations = (options.iterations or 0) * ITERATION_S
    return START_UP_S + len(options.sizes) * (SIZE_S + iterations)


@contextlib.contextmanager
def disturbed(wanted: bool) -> Iterator[subprocess.Popen[bytes] | None]:
    """Runs a process that occupies a core, as other programs on a rank's host can do."""
    if not wanted:
        yield None
        return
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    with subprocess.Popen(tied(command)) as busy:
        try:
            yield busy
        finally:
            busy.kill()


@contextlib.contextmanager
def _following(show: Callable[[list[Measurement]], None]) -> Iterator[Path]:
    """Makes a file for rank 0; measurements that rank 0 appends are shown soon after."""
    with tempfile.TemporaryDirectory(prefix="gradring-bench-") as directory:
        path = Path(directory) / "measured.jsonl"
        path.touch()
        ended = threading.Event()
        gone: list[OSError] = []

        def follow() -> None:
            try:
                _follow(path, ended, show)
            except OSError as error:  # the output has no reader any more, so the measurement ends
                gone.append(error)
                _thread.interrupt_main()

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            try:
                yield path
            finally:
                ended.set()
                follower.join()
            if gone:
                raise gone[0]
        except KeyboardInterrupt:
            if gone:
                raise gone[0] from None
            raise


def _follow(path: Path, ended: threading.Event, show: Callable[[list[Measurement]], None]) -> None:
    with path.open() as file:
        unfinished = ""
        while True:
            last = ended.wait(POLL_S)
            *lines, unfinished = (unfinished + file.read()).split("\n")
            for line in lines:
                show([Measurement(**measured) for measured in json.loads(line)])
            if last:
                return
