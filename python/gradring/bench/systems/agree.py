"""Ports of this machine that all ranks know."""

from __future__ import annotations

import numpy as np

from gradring.communicator import Communicator
from gradring.ports import free_ports


def agree_on_ports(comm: Communicator, count: int) -> list[int]:
    """Free ports that rank 0 has found; all ranks call it and get the same."""
    ports = np.zeros(count, np.int64)
    if comm.rank == 0:
        ports[:] = free_ports(count)
    comm.broadcast(ports, name="bench/ports")
    return [int(port) for port in ports]
