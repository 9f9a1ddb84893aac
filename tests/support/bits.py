"""Calls of `test_bits.py`, and the file of digests that it compares with.

The digests say what the results of reductions are to the last bit, so that a change which only
means to be faster can show that it is nothing else. Where bits are meant to change, record them:

    .venv/bin/python tests/support/bits.py

and say in the changelog whose results have changed.

Every result is in the record, those of ``algorithm="auto"`` too: what is measured when a group
forms decides only between algorithms that sum in the same order. Nor do transports, streams,
checksums or the processor's instruction set matter, so that one record serves all of them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from gradring.gradients.checks import REDUCE_OPS
from gradring.testing import run_ranks, simulated_hosts
from gradring.tools.bench.values import dtype_of

RECORD = Path(__file__).with_name("bits.json")

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]
#: Bytes where schedules, formats or the executor change: what fits into a packet, what goes along
#: with a header, what is narrowed or sent directly, tiles, and blocks.
BORDERS = [1 << 10, 4 << 10, 64 << 10]
LARGE_BORDERS = [256 << 10, 1 << 20, 5 << 20]
LARGE_DTYPES = ["float32", "bfloat16"]

#: Settings whose results may differ, by what the record calls them.
ORDERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ring": {"algorithm": "ring"},
    "direct": {"algorithm": "direct"},
    "one_shot": {"algorithm": "one_shot"},
    "reproducible": {"algorithm": "ring", "reproducible": True},
    "bfloat16 wire": {"wire_dtype": "bfloat16"},
    "float16 wire, ring": {"wire_dtype": "float16", "algorithm": "ring"},
}
WORLD_SIZES = range(2, 9)
#: The host of each rank, where there are several.
HOSTS = {"0 0 1": [0, 0, 1], "0 1 0 1": [0, 1, 0, 1], "0 1 2 0 1 2": [0, 1, 2, 0, 1, 2]}

#: By dtype, and by what was done.
Digests = dict[str, dict[str, str]]


@cache
def contribution(rank: int, count: int, dtype: str) -> NDArray[Any]:
    """Numbers of many magnitudes and both signs, made by arithmetic that no version changes."""
    bits = np.arange(count, dtype=np.uint64) + np.uint64(count * 64 + rank)
    for shift in (31, 29):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(0x9E3779B97F4A7C15)
    integers = (bits >> np.uint64(40)).astype(np.int64) - (1 << 23)
    exponents = (bits & np.uint64(15)).astype(np.int32) - 31
    is_integer = dtype in ("int32", "int64", "uint8")
    wide = integers if is_integer else np.ldexp(integers.astype(np.float64), exponents)
    values: NDArray[Any] = wide.astype(dtype_of(dtype))
    return values


def cases(world_size: int) -> Iterator[tuple[str, gradring.ReduceOp, int]]:
    """Dtype, op and number of elements of every all-reduce."""
    for dtype in DTYPES:
        elements = [border // dtype_of(dtype).itemsize for border in BORDERS]
        for op in REDUCE_OPS:
            yield dtype, op, world_size - 1
            yield dtype, op, elements[1] + 1
        for count in elements:
            yield dtype, "mean", count
        yield dtype, "sum", elements[2] + 1
    for dtype in LARGE_DTYPES:
        for border in LARGE_BORDERS:
            yield dtype, "mean", border // dtype_of(dtype).itemsize + 1


def digests(comm: gradring.Communicator) -> Digests:
    """What this rank gets."""
    hashes = {dtype: {op: hashlib.sha256() for op in (*REDUCE_OPS, "parts")} for dtype in DTYPES}
    works = []
    for dtype, op, count in cases(comm.world_size):
        x = contribution(comm.rank, count, dtype).copy()
        works.append((hashes[dtype][op], x, comm.all_reduce_async(x, op=op)))
    for found, x, work in works:
        work.wait()
        found.update(x.tobytes())
    for dtype in DTYPES:
        count = BORDERS[1] // dtype_of(dtype).itemsize + 1
        part = comm.reduce_scatter(contribution(comm.rank, count, dtype), op="mean")
        hashes[dtype]["parts"].update(comm.all_gather(part).tobytes())
    return {
        dtype: {op: found.hexdigest()[:8] for op, found in by_op.items()}
        for dtype, by_op in hashes.items()
    }


def digests_of_a_process(settings: dict[str, Any]) -> Digests:
    with gradring.init(**settings) as comm:
        return digests(comm)


def on_hosts(host_of_each_rank: Sequence[int]) -> list[Digests]:
    """Of each rank on simulated hosts, where large buffers are reduced inside hosts first."""
    with simulated_hosts(max(host_of_each_rank) + 1) as hosts:
        placed = [hosts[host] for host in host_of_each_rank]
        settings = {"algorithm": "hierarchical"}
        return run_ranks(digests_of_a_process, len(placed), settings, hosts=placed)


def record() -> None:
    """Writes what is computed now."""
    from support.pairs import on_threads

    found = {
        f"{world_size} ranks, {order}": on_threads(world_size, digests, **settings)
        for world_size in WORLD_SIZES
        for order, settings in ORDERS.items()
    }
    found |= {f"hosts {name}": on_hosts(placed) for name, placed in HOSTS.items()}
    groups = []
    for name, ranks in found.items():
        if any(rank != ranks[0] for rank in ranks):
            raise SystemExit(f"{name}: the ranks differ, so that there is nothing to record")
        lines = [f"{json.dumps(dtype)}: {json.dumps(ops)}" for dtype, ops in ranks[0].items()]
        groups.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(groups) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record()
