"""Parameter server process: the life of a task of type ``ps``, which makes no strategy."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gradring import _native, updates
from gradring.clusters import Servers, tf_config
from gradring.config import parse
from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.observe.update_report import mean_staleness
from gradring.updates.rules import check_servers

if TYPE_CHECKING:
    from gradring.observe.metrics import MetricsServer


def config_of(servers: list[str]) -> _native.Config:
    """Returns the settings of this process, with the credentials of the job with these servers."""
    job_id = parse.given_job_id(os.environ) or tf_config.job_id_of(servers)
    return Settings.from_environ(os.environ).for_core(job_id=job_id)


def make_server(
    rule: updates.ParameterServer, addresses: list[str], index: int, workers: int
) -> _native.ParameterServer:
    """Makes a server that listens.

    Raises:
        gradring.errors.ConfigError: Its port or its directory cannot be used, or the rule needs
            more servers.
    """
    check_servers(rule, len(addresses))
    return _native.ParameterServer(
        index=index,
        addresses=addresses,
        rules={"workers": str(workers), **rule.texts()},
        # Servers of one machine may share the rule's directory.
        directory=None if rule.snapshots is None else Path(rule.snapshots, f"server-{index}"),
        worker_timeout=rule.worker_timeout,
        config=config_of(addresses),
    )


def serve(update: updates.Rule, servers: Servers) -> NoReturn:
    """Serves until the workers have ended, and ends the process with exit code 0.

    Raises:
        gradring.errors.ConfigError: The rule has no servers, or this one cannot listen.
        gradring.errors.GradringError: No worker came, or server 0 was lost.
        SystemExit: All workers have ended; the exit code is 0.
    """
    assert servers.own is not None
    if not isinstance(update, updates.ParameterServer):
        raise ConfigError(
            f"this process is ps {servers.own} of TF_CONFIG, and update={update} has no parameter "
            "servers; pass update=updates.ParameterServer(...), or start no tasks of type ps"
        )
    server = make_server(update, list(servers.addresses), servers.own, servers.workers)
    if threading.current_thread() is threading.main_thread():
        # A launcher sends SIGTERM when workers are lost; the server must not wait for their return.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    metrics = _serve_metrics(server, servers)
    try:
        server.serve()
    finally:
        if metrics is not None:
            metrics.close()
        print(f"ps {servers.own} ends: {summary(server.stats())}", file=sys.stderr, flush=True)
        server.close()
    raise SystemExit(0)


def _serve_metrics(server: _native.ParameterServer, servers: Servers) -> MetricsServer | None:
    """Serves this server's metrics, on a port above those of the workers, if a port is set."""
    settings = Settings.from_environ(os.environ)
    if settings.prometheus_port is None:
        return None
    from gradring.observe import metrics  # most programs do not need a web server

    port = settings.prometheus_port + servers.workers + (servers.own or 0)
    return metrics.serve_at(
        [port],
        settings.prometheus_address,
        lambda: metrics.render_server(server.stats()),
        f"parameter server {servers.own}",
    )


def summary(stats: _native.ServerStats) -> str:
    """Returns a server's counts as one line of text."""
    words = [f"version {stats['version']}", f"{stats['bytes_sent'] / 1e6:.1f} MB sent"]
    if stats["server"] == 0:
        dropped = {
            "late": stats["dropped_late"],
            "for want of room": stats["dropped_overflow"],
            "of lost workers": stats["dropped_lost"],
        }
        words.append(f"{stats['updates']} updates of {stats['pushes']} gradients")
        if stats["optimizers"] > 1:
            words.append(f"{stats['optimizers']} optimizers")
        words += [f"{count} dropped {why}" for why, count in dropped.items() if count]
        if stats["held_overflow"]:
            words.append(f"{stats['held_overflow']} had to wait for room")
        staleness = stats["staleness"]
        mean = mean_staleness(staleness)
        if mean is not None:
            words.append(f"staleness {mean:.2f} on average, {max(staleness)} at most")
    return ", ".join(words)
