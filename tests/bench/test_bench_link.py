"""``gradring bench link``: what it writes, and that it notices bytes that are not as sent."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from pathlib import Path

import numpy as np
import pytest

import gradring
from gradring.machine import resources
from gradring.testing import run_ranks
from gradring.tools.bench import raw_link
from gradring.tools.bench.options import format_size
from gradring.tools.bench.systems import link
from gradring.tools.bench.systems.link import Exchange, Link, open_ring
from gradring.tools.bench.table import Columns
from gradring.tools.cli import main
from support.chosen import marked_rows

#: Elements and ranks: fewer than there are ranks, and more than fit into one block.
QUICK = ((1, 3), (1000, 2), (100_001, 3))


def test_both_directions_and_the_round_trip_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "link.json"
    assert main(["bench", "link", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["block_bytes"] for row in found["bandwidths"]] == [*raw_link.BLOCKS_BYTES]
    for row in found["bandwidths"]:
        assert 0 < row["p90_gbps"] <= row["median_gbps"] <= row["best_gbps"]
        assert (row["wrong"], row["exchanges"]) == (0, raw_link.EXCHANGES)
    trips = [found[f"{which}round_trip_us"] for which in ("best_", "", "p90_", "p99_")]
    assert trips[0] > 0 and trips == sorted(trips)
    assert found["congestion_control"]
    assert found["date"].startswith("20") and found["machine"] == resources.machine()
    # Two tables with a head for each column; all else is a comment.
    output = capsys.readouterr().out
    assert "over one TCP connection" in output
    lines = [line for line in output.splitlines() if not line.startswith(("#", "wrote"))]
    tables = cells(lines[:5], raw_link._BANDWIDTHS), cells(lines[5:], raw_link._ROUND_TRIPS)
    for row, shown in zip(found["bandwidths"], tables[0], strict=True):
        assert shown["block"] == format_size(row["block_bytes"]) and shown["volume"] == "64 MiB"
        assert shown["median GB/s"] == f"{row['median_gbps']:.3f}" and shown["wrong"] == "0"
    (shown,) = tables[1]
    assert shown["size"] == "4 B" and shown["p99 us"] == f"{found['p99_round_trip_us']:.1f}"


def cells(lines: list[str], columns: Columns) -> list[dict[str, str]]:
    """The rows of a table by the titles of its columns."""
    found: list[list[str]] = []
    for line in lines:
        found.append([])
        at = 0
        for _, width, *_ in columns:
            found[-1].append(line[at : at + width].strip())
            at += width + 1
        assert at > len(line)
    head, *rows = found
    assert head == [title for title, *_ in columns]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("count", "world_size"),
    marked_rows(itertools.product((1, 1000, 100_001), (2, 3)), QUICK),
)
def test_bytes_come_from_the_rank_before_whatever_their_number(count: int, world_size: int) -> None:
    assert run_ranks(_exchange, world_size, count) == [(0, True)] * world_size


@pytest.mark.parametrize(("world_size", "connections"), [(2, 1), (3, 2)])
def test_two_ranks_have_one_connection_for_both_directions(
    world_size: int, connections: int
) -> None:
    assert run_ranks(_connections, world_size) == [(connections, "reno")] * world_size


def _connections() -> tuple[int, str]:
    with gradring.init() as comm, contextlib.ExitStack() as closing:
        link = open_ring(comm, closing)
        comm.barrier()
        ends = (link._next, link._previous)
        names = {frozenset((end.getsockname(), end.getpeername())) for end in ends}
        return len(names), link.congestion_control()


def _exchange(count: int) -> tuple[int, bool]:
    with gradring.init() as comm, contextlib.ExitStack() as closing:
        exchange = Exchange(open_ring(comm, closing), comm.rank, comm.world_size, count, 4096)
        wrong = exchange.iterate(3, comm.barrier).wrong
        exchange.reset()
        spoiled = not np.any(exchange.result() == exchange.expected)
        comm.barrier()
        return wrong, spoiled


def test_a_ring_that_stands_still_or_has_lost_a_rank_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "TIMEOUT_S", 0.01)
    buffer = memoryview(bytearray(8))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as own,
        server.accept()[0] as other,
        own.dup() as previous,
    ):
        # One of two ranks has one connection for both directions.
        ends = Link(own, previous, same_host=False)
        with pytest.raises(TimeoutError, match=r"has been silent for 0\.01 s"):
            ends.exchange(buffer, buffer, 8)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the rank before this one has closed its link"):
            ends.exchange(buffer, buffer, 8)
