"""Metrics for Prometheus: right, well formed, and for this machine alone unless told otherwise."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import parser

import gradring
from gradring.config.values import Settings
from gradring.launch.hosts import parse_hosts
from gradring.machine.ports import free_ports
from gradring.observe import metrics
from gradring.observe.observer import observe_worker, observer_of
from gradring.stats import Stats
from gradring.testing import run_ranks
from support.proc import has_ipv6
from support.waiting import wait_until

GRAFANA = Path(__file__).parents[2] / "examples" / "grafana"

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


def ask(port: int, path: str = "/metrics", address: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def train(port: int) -> tuple[Samples, Stats]:
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


@pytest.fixture(scope="module")
def served() -> list[tuple[Samples, Stats]]:
    """What two ranks serve, and their statistics."""
    port = two_free_ports()
    return run_ranks(train, 2, port, env={"GRADRING_PROMETHEUS_PORT": str(port)})


def test_every_rank_serves_what_it_has_counted(served: list[tuple[Samples, Any]]) -> None:
    for rank, (samples, stats) in enumerate(served):
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


def labels_of(samples: Samples) -> dict[str, set[str]]:
    """The labels of each metric once Prometheus has it."""
    own = {"rank", "job", "instance"}
    return {
        name: own.union(*({label for label, _ in labels} for labels in found))
        for name, found in samples.items()
    }


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """The queries of the dashboard, and what each calls its lines."""
    dashboard = json.loads((GRAFANA / "gradring.json").read_text())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert asked is not None
            yield f"count by ({asked[2]}) ({asked[1]})", ""
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["targets"]
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def test_the_dashboard_asks_for_what_is_served(served: list[tuple[Samples, Any]]) -> None:
    known = labels_of(served[0][0])
    asked = set()
    for query, legend in dashboard_queries():
        metrics_asked = set(re.findall(r"gradring_\w+", query))
        assert metrics_asked and metrics_asked <= known.keys(), query
        selectors = ",".join(re.findall(r"\{(.*?)\}", query))
        groups = ",".join(re.findall(r"\b(?:by|on|group_left) \((.*?)\)", query))
        labels = set(re.findall(r"(\w+)=~?[\"']", selectors)) | set(re.findall(r"\w+", groups))
        labels |= set(re.findall(r"\{\{(\w+)\}\}", legend))
        for label in labels:
            assert any(label in known[metric] for metric in metrics_asked), f"{label} in {query}"
        asked |= metrics_asked
    assert asked == known.keys(), "the dashboard shows all that is served"


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((GRAFANA / "gradring.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))


def test_the_configuration_for_prometheus_asks_every_rank() -> None:
    text = (GRAFANA / "prometheus.yml").read_text()
    (targets,) = re.findall(r"targets: (\[.*\])", text)
    (hosts,) = re.findall(r"--hosts (\S+)", text)
    (port,) = re.findall(r"GRADRING_PROMETHEUS_PORT=(\d+)", text)
    assert json.loads(targets) == [
        f"{host.name}:{int(port) + local}"
        for host in parse_hosts(hosts)
        for local in range(host.slots)
    ]


def test_a_port_that_is_taken_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, gradring.init() as comm:
        port = taken.getsockname()[1]
        gradring.Monitor(comm, prometheus_port=port, stream=io.StringIO())
        assert observer_of(comm).metrics is None
        comm.barrier()
        lines = metrics.render(comm).splitlines()
    assert any(line.startswith("gradring_info{") for line in lines)
    assert "serves no metrics: 127.0.0.1:" in caplog.text


def served_again_beside_a_fork(port: int) -> list[bool]:
    """Whether each of two groups has served, while a fork of the first one lives."""
    served: list[bool] = []
    reading, writing = os.pipe()
    for rendezvous in free_ports(2):
        with gradring.init(rendezvous=f"127.0.0.1:{rendezvous}") as comm:
            if not served and os.fork() == 0:
                os.close(writing)
                os.read(reading, 1)  # until the rank ends
                os._exit(0)
            served.append("gradring_info" in ask(port + comm.local_rank))
    return served


def test_a_fork_does_not_keep_the_port() -> None:
    (port,) = free_ports(1)
    variables = {"GRADRING_PROMETHEUS_PORT": str(port)}
    assert run_ranks(served_again_beside_a_fork, 1, port, env=variables) == [[True, True]]


@pytest.mark.parametrize(
    ("address", "others"),
    [("0.0.0.0", ["127.0.0.2"]), ("::", ["127.0.0.2", "[::1]"]), ("::1", ["[::1]"])],
)
@pytest.mark.parametrize("by_variable", [True, False])
def test_another_address_can_be_chosen(
    address: str, others: list[str], by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in address and not has_ipv6():
        pytest.skip("this system has no IPv6")
    (port,) = free_ports(1, "0.0.0.0")
    if by_variable:
        monkeypatch.setenv("GRADRING_PROMETHEUS_ADDRESS", address)
        monkeypatch.setenv("GRADRING_PROMETHEUS_PORT", str(port))
    with gradring.init() as comm:
        if not by_variable:
            monitor = gradring.Monitor(comm, prometheus_port=port, prometheus_address=address)
        for other in others:
            assert "gradring_info" in parsed(ask(port, address=other))
        if not by_variable:
            monitor.finish()


def test_clients_that_say_nothing_cannot_exhaust_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 600.0)
    (port,) = free_ports(1)
    with gradring.init() as comm, contextlib.ExitStack() as idle:
        gradring.Monitor(comm, prometheus_port=port, stream=io.StringIO())
        threads = threading.active_count()
        for _ in range(metrics.CLIENTS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(port)
        assert threading.active_count() <= threads + metrics.CLIENTS
        idle.close()
        wait_until(lambda: threading.active_count() <= threads, "their places are free")
        assert "gradring_info" in parsed(ask(port))


def test_a_client_for_whom_there_is_no_thread_takes_no_others_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (port,) = free_ports(1)
    with gradring.init() as comm:
        gradring.Monitor(comm, prometheus_port=port, stream=io.StringIO())
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            for _ in range(metrics.CLIENTS + 1):
                with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                    ask(port)
        assert "gradring_info" in parsed(ask(port))


def test_a_rank_that_serves_already_goes_on_at_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port, other = free_ports(2)
    monkeypatch.setenv("GRADRING_PROMETHEUS_PORT", str(port))
    with gradring.init() as comm:
        monitor = gradring.Monitor(comm, prometheus_port=other, stream=io.StringIO())
        for _ in range(2):
            monitor.step(metrics={"loss": 0.25, "gradient_norm": 3})
        monitor.pause()
        found = parsed(ask(port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", other), timeout=20)
    assert found["gradring_batch_metric"] == {
        (("name", "loss"),): 0.25,
        (("name", "gradient_norm"),): 3.0,
    }


def test_a_worker_of_parameter_servers_serves_at_a_port_of_its_own() -> None:
    port = two_free_ports()
    settings = Settings.from_environ({"GRADRING_PROMETHEUS_PORT": str(port)})
    counted = {"version": 7, "pushes": 6, "waited_s": 0.5}
    with gradring.init() as comm:
        observe_worker(comm, settings, 1, lambda: counted)
        text = ask(port + 1)
    found = parsed(text)
    assert 'gradring_info{rank="1",' in text
    names = ("version", "pushes_total", "pull_seconds_total")
    assert [found[f"gradring_{name}"] for name in names] == [{(): 7}, {(): 6}, {(): 0.5}]


def test_what_became_of_gradients_is_told_by_the_first_server_alone() -> None:
    stats: Any = {"server": 1, "version": 3, "bytes_sent": 40, "bytes_received": 80}
    bytes_moved = (
        'gradring_server_bytes_total{server="1",direction="sent"} 40.0',
        'gradring_server_bytes_total{server="1",direction="received"} 80.0',
    )
    samples = [line for line in metrics.render_server(stats).splitlines() if line[0] != "#"]
    assert samples == ['gradring_version{server="1"} 3.0', *bytes_moved]
    fates = {"pushes": 5, "dropped_late": 1, "dropped_overflow": 0, "dropped_lost": 2}
    of_all: Any = {"members": [0, 3], "updates": 3, "queue": 0, "staleness": {0: 4, 2: 1}, **fates}
    text = metrics.render_server(stats | of_all | {"server": 0})
    assert 'gradring_workers{server="0"} 2.0\n' in text
    assert 'gradring_gradients_total{server="0",fate="lost"} 2.0\n' in text
    assert 'gradring_gradient_staleness_bucket{server="0",le="1"} 4.0\n' in text
    assert 'gradring_gradient_staleness_sum{server="0"} 2.0\n' in text


def test_an_address_of_another_host_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with gradring.init() as comm:
        gradring.Monitor(comm, prometheus_port=9400, prometheus_address="2001:db8::1").finish()
        assert observer_of(comm).metrics is None
    assert "serves no metrics: [2001:db8::1]:9400: " in caplog.text


def test_labels_are_escaped() -> None:
    with gradring.init() as comm:
        comm.host = 'a"b\\c\nd'
        samples = parsed(metrics.render(comm))
    (about,) = samples["gradring_info"]
    assert dict(about)["host"] == 'a"b\\c\nd'
