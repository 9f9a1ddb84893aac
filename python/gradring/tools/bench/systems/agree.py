"""Addresses and free ports for the ranks of a benchmark, known to all of them."""

from __future__ import annotations

import os
from ipaddress import IPv4Address

import numpy as np

from gradring.clusters.own_host import address_towards
from gradring.config import parse
from gradring.group.communicator import Communicator
from gradring.machine.ports import LOOPBACK, free_ports


def agree_on_ports(comm: Communicator, count: int) -> list[int]:
    """Returns free ports of rank 0's host; all ranks call it and get the same."""
    ports = np.zeros(count, np.int64)
    if comm.rank == 0:
        ports[:] = free_ports(count)
    comm.broadcast(ports, name="bench/ports")
    return [int(port) for port in ports]


def agree_on_addresses(comm: Communicator) -> list[str]:
    """Returns each rank's address: in a simulated network, else loopback; all ranks call it."""
    own = np.array([int(IPv4Address(own_address()))], np.int64)
    return [str(IPv4Address(int(address))) for address in comm.all_gather(own).ravel()]


def own_address() -> str:
    """Returns the address at which the other ranks reach this one."""
    rendezvous = os.environ.get(parse.RENDEZVOUS)
    if rendezvous is None:
        return LOOPBACK
    return address_towards(rendezvous.rpartition(":")[0])
