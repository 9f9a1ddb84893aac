"""The link between two ranks: bandwidth, round trip, and difference of the clocks.

One connection has both directions, as between two ranks of a group.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from dataclasses import dataclass

from gradring.tools.bench.systems.link import Link

CONNECT_S = 10.0
ROUND_TRIPS = 50
CLOCK_READINGS = 20
WRITE_BYTES = 1 << 20
FIRST_VOLUME_BYTES, MOST_BYTES = 4 << 20, 128 << 20
#: Approximate time of each measurement of the bandwidth.
AIM_S = 0.1
#: Number of measurements; the best one counts, since other programs can use the cores.
TIMES = 3


@dataclass(frozen=True)
class LinkMeasurement:
    """The measurement of a pair, made by the lower rank.

    Attributes:
        round_trip_us: Median round trip of 4 bytes, in microseconds.
        bandwidth_gbps: Bandwidth in each direction, both at once, in 1e9 bytes/s; None if not
            measured.
        clock_offset_ms: The higher rank's clock minus the lower rank's, in milliseconds.
        problem: The reason why the two cannot reach each other, or None.
    """

    round_trip_us: float = 0.0
    bandwidth_gbps: float | None = None
    clock_offset_ms: float = 0.0
    problem: str | None = None


def initiate(address: tuple[str, int], *, same_host: bool, bandwidth: bool) -> LinkMeasurement:
    """Runs the lower rank's part: connects, measures, and returns the result."""
    try:
        with contextlib.ExitStack() as closing:
            end = closing.enter_context(socket.create_connection(address, CONNECT_S))
            link = Link(end, closing.enter_context(end.dup()), same_host=same_host)
            offset_ms = _read_clock(end)
            trips = [link.round_trip(0, 2) for _ in range(ROUND_TRIPS)]
            gbps = _measure_bandwidth(link, end, True) if bandwidth else None
            return LinkMeasurement(
                round(statistics.median(trips) * 1e6, 1), gbps, round(offset_ms, 3)
            )
    except OSError as error:
        return LinkMeasurement(problem=f"{address[0]}:{address[1]}: {error}")


def respond(server: socket.socket, *, same_host: bool, bandwidth: bool) -> None:
    """Runs the higher rank's part; the lower rank reports failures."""
    server.settimeout(2 * CONNECT_S)
    with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
        end = closing.enter_context(server.accept()[0])
        end.settimeout(CONNECT_S)
        link = Link(end, closing.enter_context(end.dup()), same_host=same_host)
        _send_clock(end)
        for _ in range(ROUND_TRIPS):
            link.round_trip(1, 2)
        if bandwidth:
            _measure_bandwidth(link, end, False)


def _read_clock(end: socket.socket) -> float:
    """Returns the other clock minus this one in ms, by the reading with the shortest round trip."""
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_READINGS):
        sent = time.time_ns()
        end.sendall(b"?")
        there = _number(end)
        received = time.time_ns()
        best = min(best, (received - sent, (there - (sent + received) / 2) / 1e6))
    return best[1]


def _send_clock(end: socket.socket) -> None:
    for _ in range(CLOCK_READINGS):
        end.recv(1)
        end.sendall(struct.pack("<q", time.time_ns()))


def _number(end: socket.socket) -> int:
    sent = end.recv(8, socket.MSG_WAITALL)
    if len(sent) < 8:
        raise ConnectionError("the other rank has closed its connection")
    return int.from_bytes(sent, "little", signed=True)


def _measure_bandwidth(link: Link, end: socket.socket, decides: bool) -> float:
    """Returns the bandwidth in 1e9 bytes/s; a first small exchange chooses the volume for `AIM_S`.

    Args:
        link: The link to the other rank.
        end: Its connection, on which the deciding rank sends the volume.
        decides: True on the deciding rank.
    """
    estimate_gbps = _exchange(link, FIRST_VOLUME_BYTES)
    end.settimeout(CONNECT_S)
    if decides:
        fitting = int(estimate_gbps * 1e9 * AIM_S)
        volume_bytes = min(max(fitting, FIRST_VOLUME_BYTES), MOST_BYTES)
        end.sendall(struct.pack("<q", volume_bytes))
    else:
        volume_bytes = _number(end)
    return round(max(_exchange(link, volume_bytes) for _ in range(TIMES)), 3)


def _exchange(link: Link, volume_bytes: int) -> float:
    """Sends and receives a volume at once; returns 1e9 bytes/s for each direction."""
    start = time.perf_counter()
    link.exchange(memoryview(bytes(WRITE_BYTES)), memoryview(bytearray(WRITE_BYTES)), volume_bytes)
    return volume_bytes / (time.perf_counter() - start) / 1e9
