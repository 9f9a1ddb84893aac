"""Metrics for Prometheus: right, well formed, and for this machine alone."""

from __future__ import annotations

import io
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
from prometheus_client import parser

import gradring
from gradring import metrics
from gradring.launch.ports import free_ports
from gradring.testing import run_ranks

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def parsed(text: str) -> Samples:
    """By name and labels; checks what Prometheus asks of names, units and types."""
    samples: Samples = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name.startswith("gradring_")
            assert sample.name.endswith("_total") == (family.type == "counter")
            labels = dict(sample.labels)
            assert labels.pop("rank").isdecimal()
            found = samples.setdefault(sample.name, {})
            assert tuple(labels.items()) not in found
            found[tuple(labels.items())] = sample.value
    return samples


def ask(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def train(port: int) -> tuple[Samples, dict[str, Any]]:
    with gradring.init() as comm:
        monitor = gradring.Monitor(comm, every_steps=5, stream=io.StringIO())
        for step in range(21):
            time.sleep(0.05 if comm.rank == 1 else 0)
            comm.all_reduce(np.ones(1000, np.float32), name="g")
            monitor.step(loss=1 / (1 + step))
        monitor.pause()
        comm.barrier()
        samples = parsed(ask(port + comm.local_rank))
        # Where all interfaces are listened at, this address of Linux is too.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port + comm.local_rank), timeout=20)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(port + comm.local_rank, "/")
        stats = comm.stats()
        comm.barrier()
    with pytest.raises(urllib.error.URLError):
        ask(port + comm.local_rank)
    return samples, stats


def two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        (port,) = free_ports(1)
        try:
            with socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue


def test_every_rank_serves_what_it_has_counted() -> None:
    port = two_free_ports()
    env = {"GRADRING_PROMETHEUS_PORT": str(port)}
    for rank, (samples, stats) in enumerate(run_ranks(train, 2, port, env=env)):
        kind = (("collective", "all_reduce"),)
        assert samples["gradring_collectives_total"][kind] == 21
        assert samples["gradring_collective_bytes_total"][kind] == 21 * 4000
        (about,) = samples["gradring_info"]
        assert dict(about)["world_size"] == "2"
        assert dict(about)["version"] == gradring.__version__
        phases = samples["gradring_collective_seconds_total"]
        assert {dict(labels)["phase"] for labels in phases} == {"waiting", "moving"}
        total = sum(stats["collectives"][kind]["time_s"] for kind in stats["collectives"])
        assert sum(phases.values()) == pytest.approx(total)
        assert samples["gradring_steps_total"] == {(): 20}
        parts = {
            dict(labels)["part"]: s for labels, s in samples["gradring_step_seconds_total"].items()
        }
        assert sum(parts.values()) > 20 * 0.05 * 0.9
        assert samples["gradring_loss"] == {(): pytest.approx(1 / 21)}
        if rank == 0:
            late = samples["gradring_lateness_seconds_total"][(("peer", "1"),)]
            assert late == pytest.approx(stats["lateness_s"][1])
            assert parts["waiting"] > parts["compute"]


def alone() -> list[str]:
    """A second communicator at a port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken, gradring.init() as comm:
        port = taken.getsockname()[1]
        gradring.Monitor(comm, prometheus_port=port, stream=io.StringIO())
        assert comm._metrics is None
        comm.barrier()
        return metrics.render(comm).splitlines()


def test_a_port_that_is_taken_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    lines = alone()
    assert any(line.startswith("gradring_info{") for line in lines)
    assert "serves no metrics: 127.0.0.1:" in caplog.text


def test_labels_are_escaped() -> None:
    with gradring.init() as comm:
        comm.host = 'a"b\\c\nd'
        samples = parsed(metrics.render(comm))
    (about,) = samples["gradring_info"]
    assert dict(about)["host"] == 'a"b\\c\nd'
