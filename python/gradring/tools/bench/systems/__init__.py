"""The systems that can be measured: gradring itself, and its peers, one file each.

====================  ===================================================================
``system``            the interfaces of a system and of a peer's file
``own``               gradring over numpy arrays
``link``              the raw links below, as the limit
``tensorflow``        TensorFlow's own collectives, and gradring inside TensorFlow
``gloo``              Gloo, from PyTorch
``mpi``, ``mpi_rank``  Open MPI over TCP and shared memory, in ranks of its own
``agree``             ports and addresses that all ranks know
====================  ===================================================================

Each peer has a file, and its name in `PEERS`.
"""

from __future__ import annotations

import importlib
from typing import cast

from gradring.tools.bench.systems.system import LocalReduction, Peer, System

#: Names of the peers and of their modules in this package.
PEERS = ("tensorflow", "gloo", "mpi")

__all__ = ["PEERS", "LocalReduction", "Peer", "System", "load_peer"]


def load_peer(name: str) -> Peer:
    """Returns the module of one of `PEERS`; imports nothing of the peer itself."""
    return cast(Peer, importlib.import_module(f"{__name__}.{name}"))
