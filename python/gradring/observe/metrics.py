"""Metrics of a rank for Prometheus: its text format over HTTP.

Only processes of this machine can ask, unless another address is chosen. There is neither a
password nor encryption: where these are wanted, an agent or a tunnel on each machine has them.
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
        _listening.add(self._server)
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


def _leave_to_parent() -> None:
    """A forked child, which answers nobody, must not keep the port from who comes after."""
    for server in list(_listening):
        server.server_close()


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


_listening: weakref.WeakSet[_Server] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)


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


#: By name; totals are counters.
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
    "step_seconds_total": "Time in training steps, by what it went into.",
    "loss": "The loss that the program has named last.",
    "batch_metric": "What the rank has measured of its own batch.",
    "version": "Updates in the variables.",
    "pushes_total": "Gradients pushed.",
    "pull_seconds_total": "Time in pulls.",
    "server_bytes_total": "Bytes sent and received.",
    "workers": "Workers that count.",
    "updates_total": "Updates made.",
    "gradients_total": "Gradients of all workers, by what became of them.",
    "queued_gradients": "Gradients that wait.",
    "gradient_staleness": "By how many versions weights had gone on when a gradient was applied.",
}


class _Text:
    """Prometheus' text format, as it grows."""

    def __init__(self, own: dict[str, str]) -> None:
        self._own = own
        self._lines: list[str] = []

    def family(self, name: str, samples: Iterable[update_report.Sample]) -> None:
        self._begin(name, "counter" if name.endswith("_total") else "gauge")
        for sample in samples:
            self._add(name, sample)

    def one(self, name: str, value: float) -> None:
        """A family of one sample without labels of its own."""
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
    """All metrics of this rank in Prometheus' text format.

    Args:
        communicator: Whose.
        counted: What a `gradring.Monitor` has counted, and its loss, if there is one.
        worker: Which worker of parameter servers it is, if it is one, which is in no group.
        updates: What it has counted as such.
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
    """All metrics of a parameter server; what became of gradients is known to the first."""
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
    """What a `gradring.Monitor` has counted."""
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
