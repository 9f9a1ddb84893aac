"""Metrics of a rank for Prometheus: its text format over HTTP.

Only processes of this machine can connect, by default. The server has no authentication and no
encryption; if you need these, use an agent or a tunnel on each machine.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal

from gradring._native import build_info
from gradring.config.parse import joined_address
from gradring.group.communicator import Communicator, core_of
from gradring.observe import update_report
from gradring.observe.step_report import Totals

if TYPE_CHECKING:
    from gradring._native import ServerStats

_Counter = Literal["count", "bytes", "bytes_sent", "waiting_s", "moving_s"]
#: Totals of a `gradring.Monitor` and its loss; None without a monitor.
Counted = tuple[Totals, float | None] | None
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Time limit for a client's request.
REQUEST_S = 5.0
#: Largest number of concurrent requests; more are refused, so that clients cannot exhaust a rank.
CLIENTS = 16

_log = logging.getLogger("gradring")


class MetricsServer:
    """Answers ``GET /metrics`` on a daemon thread."""

    def __init__(self, text: Callable[[], str], port: int, address: str) -> None:
        """Listens at an IP address and a port, 0 for a free one; ``::`` includes IPv4.

        Raises:
            OSError: The port is taken, or the address is not this host's.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "ask for /metrics")
                    return
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Does nothing: a request every few seconds is not worth a log line."""

        server = _ServerOfIPv6 if ":" in address else _Server
        self._server = server((address, port), Handler)
        _listening.add(self._server)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="gradring-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _leave_to_parent() -> None:
    """Closes the sockets in a forked child, which has no server thread but would hold the port."""
    for server in list(_listening):
        server.server_close()


# Not `http.server.HTTPServer`: it looks up the host's name, and a name server can be slow.
class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # A hanging client must not delay the program's end.
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self._places = threading.Semaphore(CLIENTS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: a client that has disconnected is not worth a log line."""


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


_listening: weakref.WeakSet[_Server] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)


def serve(
    communicator: Communicator, port: int, address: str, text: Callable[[], str]
) -> MetricsServer | None:
    """Serves at ``port`` plus the local rank; returns None, with a warning, if it is taken.

    In an elastic job, local ranks change but ports do not. So if another process has the port of
    this local rank, this process takes the first free port of the host's ranks.
    """
    own = port + communicator.local_rank
    others = (
        range(port, port + communicator.local_size) if core_of(communicator).generation > 0 else ()
    )
    who = f"rank {communicator.rank} on {communicator.host}"
    return serve_at((own, *others), address, text, who)


def serve_at(
    ports: Sequence[int], address: str, text: Callable[[], str], who: str
) -> MetricsServer | None:
    """Serves at the first free port of `ports`; returns None, with a warning, if none is free."""
    failure: Exception | None = None
    for one in ports:
        try:
            return MetricsServer(text, one, address)
        except (OSError, OverflowError) as error:
            failure = failure or error
    _log.warning(
        "%s serves no metrics: %s: %s",
        who,
        joined_address(address, ports[0]),
        getattr(failure, "strerror", None) or failure,
    )
    return None


#: Help texts by name of the metric; names that end in ``_total`` are counters.
_MEANINGS = {
    "info": "What this rank is.",
    "collectives_total": "Collectives that ended well.",
    "collective_bytes_total": "Bytes of their buffers.",
    "sent_bytes_total": "Bytes of payload sent.",
    "collective_seconds_total": (
        "Time in collectives: waiting for peers to enter, then moving bytes."
    ),
    "exposed_seconds_total": "Time in which the program stood still for collectives.",
    "lateness_seconds_total": (
        "Time waited at the start of collectives because this peer entered last."
    ),
    "steps_total": "Training steps; the first does not count.",
    "step_seconds_total": "Time in training steps, by kind of work.",
    "loss": "The loss that the program has named last.",
    "batch_metric": "Metrics of the rank's own batch.",
    "version": "Updates in the variables.",
    "pushes_total": "Gradients pushed.",
    "pull_seconds_total": "Time in pulls.",
    "server_bytes_total": "Bytes sent and received.",
    "workers": "Workers that count.",
    "updates_total": "Updates made.",
    "gradients_total": "Gradients of all workers, by outcome.",
    "queued_gradients": "Gradients that wait.",
    "gradient_staleness": "Versions between the pull of weights and the update by their gradient.",
}


class _Text:
    """A builder of Prometheus' text format."""

    def __init__(self, own: dict[str, str]) -> None:
        self._own = own
        self._lines: list[str] = []

    def family(self, name: str, samples: Iterable[update_report.Sample]) -> None:
        self._begin(name, "counter" if name.endswith("_total") else "gauge")
        for sample in samples:
            self._add(name, sample)

    def one(self, name: str, value: float) -> None:
        """Adds a family of one sample without labels of its own."""
        self.family(name, [({}, value)])

    def histogram(self, name: str, staleness: update_report.Staleness) -> None:
        self._begin(name, "histogram")
        for suffix, sample in update_report.buckets(staleness):
            self._add(name + suffix, sample)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _begin(self, name: str, kind: str) -> None:
        self._lines.append(f"# HELP gradring_{name} {_MEANINGS[name]}")
        self._lines.append(f"# TYPE gradring_{name} {kind}")

    def _add(self, name: str, sample: update_report.Sample) -> None:
        labels, value = sample
        self._lines.append(f"gradring_{name}{_labels({**self._own, **labels})} {float(value)!r}")


def render(
    communicator: Communicator,
    counted: Counted = None,
    worker: int | None = None,
    updates: Mapping[str, Any] = {},
) -> str:
    """Returns all metrics of this rank in Prometheus' text format.

    Args:
        communicator: The rank's communicator.
        counted: Totals and loss of a `gradring.Monitor`, if there is one.
        worker: Number of a worker of parameter servers, which has no group; None in a group.
        updates: The worker's counters.
    """
    text = _Text({"rank": str(communicator.rank if worker is None else worker)})
    stats = communicator.stats()

    def by_kind(key: _Counter, **labels: str) -> list[tuple[dict[str, str], float]]:
        totals = stats["collectives"].items()
        return [({"collective": kind, **labels}, done[key]) for kind, done in totals]

    about = {
        "host": communicator.host,
        "world_size": str(communicator.world_size),
        "transport": stats["transport"],
        "version": build_info()["version"],
    }
    text.family("info", [(about, 1)])
    text.family("collectives_total", by_kind("count"))
    text.family("collective_bytes_total", by_kind("bytes"))
    text.family("sent_bytes_total", by_kind("bytes_sent"))
    seconds = by_kind("waiting_s", phase="waiting") + by_kind("moving_s", phase="moving")
    text.family("collective_seconds_total", seconds)
    text.one("exposed_seconds_total", stats["exposed_s"])
    late = stats["lateness_s"].items()
    text.family("lateness_seconds_total", (({"peer": str(peer)}, value) for peer, value in late))
    if counted is not None:
        _steps(text, *counted)
    if updates:
        text.one("version", updates["version"])
        text.one("pushes_total", updates["pushes"])
        text.one("pull_seconds_total", updates["waited_s"])
    return str(text)


def render_server(stats: ServerStats) -> str:
    """Returns all metrics of a parameter server; only the first server counts gradients."""
    text = _Text({"server": str(stats["server"])})
    text.one("version", stats["version"])
    moved: list[update_report.Sample] = [
        ({"direction": "sent"}, stats["bytes_sent"]),
        ({"direction": "received"}, stats["bytes_received"]),
    ]
    text.family("server_bytes_total", moved)
    if stats["server"] > 0:
        return str(text)
    fates = {"applied": "pushes", **update_report.DROPPED}
    counts: Mapping[str, Any] = stats
    text.one("workers", len(stats["members"]))
    text.one("updates_total", stats["updates"])
    text.family("gradients_total", (({"fate": fate}, counts[n]) for fate, n in fates.items()))
    text.one("queued_gradients", stats["queue"])
    text.histogram("gradient_staleness", stats["staleness"])
    return str(text)


def _steps(text: _Text, totals: Totals, loss: float | None) -> None:
    """Adds the totals of a `gradring.Monitor`."""
    text.one("steps_total", totals.steps)
    parts = {
        "compute": totals.compute_s,
        "input": totals.input_s,
        "communication": totals.comm_s,
        "waiting": totals.wait_s,
    }
    text.family("step_seconds_total", (({"part": part}, s) for part, s in parts.items()))
    if loss is not None:
        text.one("loss", loss)
    if totals.metrics:
        text.family("batch_metric", (({"name": n}, v) for n, v in totals.metrics.items()))


def _labels(labels: dict[str, str]) -> str:
    pairs = (f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
