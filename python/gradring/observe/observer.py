"""The observer of one communicator from start to close: metrics, records and a timeline."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradring.config.values import DEFAULTS, Settings
from gradring.group.communicator import (
    TRACE_LIMIT,
    Communicator,
    around_close,
    at_new_group,
    core_of,
    open_groups,
)
from gradring.records import paths

if TYPE_CHECKING:
    from gradring.observe.metrics import MetricsServer
    from gradring.observe.step_report import Totals

_log = logging.getLogger("gradring")


@dataclass
class Observer:
    """The state of one communicator's observation.

    Attributes:
        log_dir: Directory of a `Monitor`'s default log.
        metrics_address: Address of the metrics server, unless a `Monitor` sets another.
        metrics: The running metrics server, if any.
        counted: Returns totals and loss of the `Monitor`; None without one.
        worker: Number of this worker of parameter servers; None in a group.
        updates: Returns the worker's counters.
        input_made_s: Returns the seconds in which input workers made this rank's data; None without
            input workers.
    """

    log_dir: Path | None = None
    metrics_address: str = DEFAULTS.prometheus_address
    metrics: MetricsServer | None = None
    counted: Callable[[], tuple[Totals, float | None] | None] = lambda: None
    worker: int | None = None
    updates: Callable[[], Mapping[str, Any]] = dict
    input_made_s: Callable[[], float] | None = None


#: Numbers of this process's groups with records, which keep their files apart.
_numbers = itertools.count(1)
_observers: weakref.WeakKeyDictionary[Communicator, Observer] = weakref.WeakKeyDictionary()


def observer_of(communicator: Communicator) -> Observer:
    """Returns the observer of a communicator, which has exactly one."""
    return _observers.setdefault(communicator, Observer())


def observe(communicator: Communicator, settings: Settings) -> None:
    """Starts the records, the timeline and the metrics server that the settings ask for."""
    observer = observer_of(communicator)
    observer.log_dir = settings.log_dir
    observer.metrics_address = settings.prometheus_address
    if settings.flight_dir is not None or settings.trace is not None:
        number = next(_numbers)
        _record(communicator, settings, number)
        at_new_group(communicator, lambda group: _record(group, settings, number))
    if settings.prometheus_port is not None:
        serve_metrics(communicator, settings.prometheus_port)
    if settings.trace is not None:
        part = paths.part_of(settings.trace, communicator.rank, number)
        # Removes this rank's files of an earlier run; it can have had more groups.
        earlier = () if open_groups.yet_to_join(communicator) else paths.written(part.parent)
        for path in earlier:
            if path.name == part.name:
                with contextlib.suppress(OSError):
                    path.unlink()
        around_close(communicator, _tracing(communicator, settings.trace, number))


def observe_worker(
    communicator: Communicator,
    settings: Settings,
    worker: int,
    updates: Callable[[], Mapping[str, Any]],
) -> None:
    """Starts the metrics server and log of a worker of parameter servers, by the settings.

    Each worker is alone in its communicator, so only worker 0 writes the log.
    """
    observer = observer_of(communicator)
    observer.worker, observer.updates = worker, updates
    observer.log_dir = settings.log_dir if worker == 0 else None
    observer.metrics_address = settings.prometheus_address
    if settings.prometheus_port is not None:
        serve_metrics(communicator, settings.prometheus_port)


def _record(communicator: Communicator, settings: Settings, number: int) -> None:
    """Starts the records of a group, which has this number in this process."""
    core = core_of(communicator)
    if settings.flight_dir is not None:
        directory = paths.of_group(settings.flight_dir, number)
        if open_groups.yet_to_join(communicator):
            # Before it joins, this process is rank 0 of a group of its own; its file must not
            # replace the job's.
            directory /= "joining"
        core.write_records_to(paths.of_generation(directory, core.generation))
    if settings.trace is not None:
        core.start_trace(TRACE_LIMIT)


def serve_metrics(communicator: Communicator, port: int, address: str | None = None) -> None:
    """Serves metrics until the communicator is closed, if the port is free.

    Args:
        communicator: The communicator; a running server is kept as it is.
        port: Port of the host's first rank; the local rank or the worker's number is added.
        address: IP address to listen at; None: the address of the settings.
    """
    if open_groups.yet_to_join(communicator):
        # The local rank, and so the port, are known only after joining.
        at_new_group(communicator, lambda group: _serve(group, port, address))
    else:
        _serve(communicator, port, address)


def _serve(communicator: Communicator, port: int, address: str | None) -> None:
    from gradring.observe import metrics  # most programs do not need a web server

    observer = observer_of(communicator)
    if observer.metrics is None:
        address = address or observer.metrics_address
        port += observer.worker or 0

        def text() -> str:
            counted, updates = observer.counted(), observer.updates()
            return metrics.render(communicator, counted, observer.worker, updates)

        observer.metrics = metrics.serve(communicator, port, address, text)
        if observer.metrics is not None:
            around_close(communicator, _serving(observer, observer.metrics))


@contextlib.contextmanager
def _serving(observer: Observer, server: MetricsServer) -> Iterator[None]:
    """Closes the metrics server when the communicator is closed."""
    try:
        yield
    finally:
        observer.metrics = None
        server.close()


@contextlib.contextmanager
def _tracing(communicator: Communicator, path: Path, number: int) -> Iterator[None]:
    """Writes this rank's part of the timeline after the group was left without an error.

    An elastic job records its last group, in which this process can have another rank.
    """
    if open_groups.yet_to_join(communicator):
        yield
        return
    part = paths.part_of(path, communicator.rank, number)
    trace = core_of(communicator).take_trace()
    yield
    if trace is None:
        _log.warning(
            "GRADRING_TRACE: rank %d leaves no part of %s: trace_stop() has ended the recording",
            communicator.rank,
            path,
        )
        return
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(trace)
    except OSError as error:  # must not hide the program's own error
        _log.warning("GRADRING_TRACE: %s cannot be written (%s)", part, error.strerror)
