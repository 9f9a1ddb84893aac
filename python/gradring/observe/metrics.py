"""Metrics of a rank for Prometheus: its text format over HTTP.

Only processes of this machine can ask, unless another address is chosen. There is neither a
password nor encryption: where these are wanted, an agent or a tunnel on each machine has them.
"""

from __future__ import annotations

import logging
import socket
import threading
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
#: What a `gradring.Monitor` has counted, and the loss; None without one.
Counted = tuple[Totals, float | None] | None
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: How long a client may take to say what it wants.
REQUEST_S = 5.0
#: Who asks while so many are being answered is sent away: strangers must not exhaust a rank.
CLIENTS = 16

_log = logging.getLogger("gradring")


class MetricsServer:
    """Answers ``GET /metrics`` on a daemon thread."""

    def __init__(self, text: Callable[[], str], port: int, address: str) -> None:
        """Listens at a port, 0 for a free one, of an IP address; ``::`` is IPv4 as well.

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
                """Says nothing: a question every few seconds is no news."""

        server = _ServerOfIPv6 if ":" in address else _Server
        self._server = server((address, port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="gradring-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """At which it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# Not `http.server.HTTPServer`: it asks for the host's name, and a name server may be slow.
class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # A client that hangs must not keep the program from ending.
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
        """A client that has gone is no news either."""


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def serve(
    communicator: Communicator, port: int, address: str, text: Callable[[], str]
) -> MetricsServer | None:
    """Serves at ``port`` plus the local rank; None, and a warning, if that is taken.

    In an elastic job local ranks change, and ports do not. So a process that comes later takes the
    first port that is left, if another process has that of its local rank.
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
    """Serves at the first of the ports that is free; None, and a warning, if none is."""
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


class _Text:
    """Prometheus' text format, as it grows."""

    def __init__(self, own: dict[str, str]) -> None:
        self._own = own
        self._lines: list[str] = []

    def family(
        self, name: str, kind: str, meaning: str, samples: Iterable[update_report.Sample]
    ) -> None:
        self._begin(name, kind, meaning)
        for sample in samples:
            self._add(name, sample)

    def histogram(self, name: str, meaning: str, staleness: update_report.Staleness) -> None:
        self._begin(name, "histogram", meaning)
        for suffix, sample in update_report.buckets(staleness):
            self._add(name + suffix, sample)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _begin(self, name: str, kind: str, meaning: str) -> None:
        self._lines.append(f"# HELP gradring_{name} {meaning}")
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
    """All metrics of this rank in Prometheus' text format.

    Args:
        communicator: Whose.
        counted: What a `gradring.Monitor` has counted, and its loss, if there is one.
        worker: Which worker of parameter servers it is, if it is one, which is in no group.
        updates: What it has counted as such.
    """
    text = _Text({"rank": str(communicator.rank if worker is None else worker)})
    family = text.family
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
    family("info", "gauge", "What this rank is.", [(about, 1)])
    family("collectives_total", "counter", "Collectives that ended well.", by_kind("count"))
    family("collective_bytes_total", "counter", "Bytes of their buffers.", by_kind("bytes"))
    family("sent_bytes_total", "counter", "Bytes of payload sent.", by_kind("bytes_sent"))
    family(
        "collective_seconds_total",
        "counter",
        "Time in collectives: waiting for peers to enter, then moving bytes.",
        by_kind("waiting_s", phase="waiting") + by_kind("moving_s", phase="moving"),
    )
    family(
        "exposed_seconds_total",
        "counter",
        "Time in which the program stood still for collectives.",
        [({}, stats["exposed_s"])],
    )
    family(
        "lateness_seconds_total",
        "counter",
        "Time waited at the start of collectives because this peer entered last.",
        (({"peer": str(peer)}, value) for peer, value in stats["lateness_s"].items()),
    )
    if counted is not None:
        _steps(family, *counted)
    if updates:
        family("version", "gauge", "Updates in the variables.", [({}, updates["version"])])
        family("pushes_total", "counter", "Gradients pushed.", [({}, updates["pushes"])])
        family("pull_seconds_total", "counter", "Time in pulls.", [({}, updates["waited_s"])])
    return str(text)


def render_server(stats: ServerStats) -> str:
    """All metrics of a parameter server; what became of gradients is known to the first."""
    text = _Text({"server": str(stats["server"])})
    text.family("version", "gauge", "Updates in the variables.", [({}, stats["version"])])
    moved: list[update_report.Sample] = [
        ({"direction": "sent"}, stats["bytes_sent"]),
        ({"direction": "received"}, stats["bytes_received"]),
    ]
    text.family("server_bytes_total", "counter", "Bytes sent and received.", moved)
    if stats["server"] > 0:
        return str(text)
    fates = {"applied": "pushes", **update_report.DROPPED}
    counts: Mapping[str, Any] = stats
    text.family("workers", "gauge", "Workers that count.", [({}, len(stats["members"]))])
    text.family("updates_total", "counter", "Updates made.", [({}, stats["updates"])])
    text.family(
        "gradients_total",
        "counter",
        "Gradients of all workers, by what became of them.",
        [({"fate": fate}, counts[name]) for fate, name in fates.items()],
    )
    text.family("queued_gradients", "gauge", "Gradients that wait.", [({}, stats["queue"])])
    text.histogram(
        "gradient_staleness",
        "By how many versions weights had gone on when a gradient was applied.",
        stats["staleness"],
    )
    return str(text)


def _steps(family: Any, totals: Totals, loss: float | None) -> None:
    """What a `gradring.Monitor` has counted."""
    family(
        "steps_total", "counter", "Training steps; the first does not count.", [({}, totals.steps)]
    )
    family(
        "step_seconds_total",
        "counter",
        "Time in training steps, by what it went into.",
        [
            ({"part": "compute"}, totals.compute_s),
            ({"part": "input"}, totals.input_s),
            ({"part": "communication"}, totals.comm_s),
            ({"part": "waiting"}, totals.wait_s),
        ],
    )
    if loss is not None:
        family("loss", "gauge", "The loss that the program has named last.", [({}, loss)])
    if totals.metrics:
        values = [({"name": name}, value) for name, value in totals.metrics.items()]
        family("batch_metric", "gauge", "What the rank has measured of its own batch.", values)


def _labels(labels: dict[str, str]) -> str:
    pairs = (f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
