"""Gloo, as PyTorch's `torch.distributed` uses it, in place, over TCP.

Gloo runs in the processes of our own ranks, with one thread each; PyTorch's thread pools are not
used in an all-reduce. The tensor shares its memory with a numpy array.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from importlib import metadata

from gradring.group.communicator import Communicator
from gradring.machine.interfaces import interface_of
from gradring.tools.bench.systems.agree import agree_on_addresses, agree_on_ports, own_address
from gradring.tools.bench.systems.system import InPlace, System, missing_module
from gradring.tools.bench.values import Problem

INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}


def missing() -> str | None:
    """Returns how to install PyTorch if it is missing; the small build for CPUs is enough."""
    return missing_module("gloo", "torch", INSTALL)


def version() -> str:
    """Returns the version of PyTorch, which contains Gloo."""
    return f"gloo (torch {metadata.version('torch')})"


def refusal(dtype: str, op: str, world_size: int, hosts: int) -> str | None:
    """Refuses means, which Gloo lacks, and bfloat16, which numpy cannot share with PyTorch."""
    if dtype not in DTYPES:
        return f"gloo is not measured with {dtype}; choose one of {', '.join(DTYPES)}"
    if op not in OPS:
        return f"gloo has no all-reduce with op {op}; choose one of {', '.join(OPS)}"
    return None


def open_systems(groups: Sequence[Communicator], closing: contextlib.ExitStack) -> Sequence[System]:
    """Connects a process group over loopback, or between simulated hosts."""
    comm = groups[0]
    os.environ["GLOO_SOCKET_IFNAME"] = str(interface_of(own_address()))
    import torch.distributed as dist

    first, (port,) = agree_on_addresses(comm)[0], agree_on_ports(comm, 1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{first}:{port}",
        rank=comm.rank,
        world_size=comm.world_size,
    )
    closing.callback(dist.destroy_process_group)
    return [System("gloo", "tcp", _prepare)]


def _prepare(problem: Problem) -> InPlace:
    import torch
    import torch.distributed as dist

    op = getattr(dist.ReduceOp, OPS[problem.op])
    return InPlace(
        problem, lambda buffer: partial(dist.all_reduce, torch.from_numpy(buffer), op=op)
    )
