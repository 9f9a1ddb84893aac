"""Cut streams: what ranks see when one of several connections of a link is cut."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading

import numpy as np
import pytest

import gradring
from faults.test_faults import assert_lost, reduce_until_killed, survivors
from gradring import errors
from gradring.testing import run_ranks
from support.chosen import marked_rows

STREAMS = 4
CUTTER, WORLD_SIZE = 1, 3
PAYLOAD_BYTES = 1_000_000
"""What only a connection for data has carried."""
ACKNOWLEDGED_AT, RECEIVED_AT, INFO_BYTES = 120, 128, 192
"""Where `struct tcp_info` of linux/tcp.h counts bytes."""
DEADLINE_S = 90
CUTS = [
    (n, delay, way)
    for n, delay in ((10, 0.0), (10, 0.5), (10_000_000, 0.5))
    for way in ("out", "in")
]
QUICK = [(10, 0.0, "out"), (10_000_000, 0.5, "in")]
"""Each number of elements, time and direction once."""


def payload_streams(direction: str) -> list[socket.socket]:
    """This process's connections on which payload went in this direction."""
    offset = {"out": ACKNOWLEDGED_AT, "in": RECEIVED_AT}[direction]
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists the directory has gone
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(fd))
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
            if struct.unpack_from("=Q", info, offset)[0] > PAYLOAD_BYTES:
                found[duplicate.getsockname(), duplicate.getpeername()] = duplicate
    return list(found.values())


def reduce_until_cut(direction: str, elements: int, delay_s: float) -> None:
    comm = gradring.init(transport="tcp", algorithm="ring", streams=STREAMS)
    large = np.ones(10_000_000, np.float32)
    comm.all_reduce(large, op="mean")  # gives the streams away by what they carried
    if comm.rank == CUTTER:
        streams = payload_streams(direction)
        assert len(streams) == STREAMS, streams
        cut = threading.Timer(delay_s, streams[1].shutdown, [socket.SHUT_RDWR])
        cut.start()
    x = np.ones(elements, np.float32)
    for _ in range(1_000_000):
        comm.all_reduce(x, op="mean", name="w")


@pytest.mark.parametrize(
    ("elements", "delay_s", "direction"),
    marked_rows(CUTS, QUICK),
)
def test_one_cut_stream_is_a_lost_peer_on_all_ranks(
    elements: int, delay_s: float, direction: str
) -> None:
    outcomes = run_ranks(
        reduce_until_cut,
        WORLD_SIZE,
        direction,
        elements,
        delay_s,
        timeout=DEADLINE_S,
        check=False,
    )
    # Either end of the stream may blame the other first; all others believe it.
    ends = {CUTTER, (CUTTER + {"out": 1, "in": -1}[direction]) % WORLD_SIZE}
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.PeerLostError), outcomes
        assert outcome.exception.rank in ends
        assert "stream" in str(outcome.exception)


def test_a_killed_rank_is_named() -> None:
    env = {"GRADRING_TRANSPORT": "tcp", "GRADRING_STREAMS": str(STREAMS)}
    arguments = (CUTTER, WORLD_SIZE, CUTTER, 5_000_000)
    assert_lost(survivors(reduce_until_killed, *arguments, env=env, timeout=DEADLINE_S), CUTTER)
