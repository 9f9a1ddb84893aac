"""The systems that can be measured: gradring itself, and its peers, one file each.

====================  ===================================================================
``system``            what a system and a peer's file have to provide
``own``               gradring over numpy arrays
``tensorflow``        TensorFlow's own collectives, and gradring inside TensorFlow
====================  ===================================================================

To add a peer, write its file and name it in :data:`PEERS`.
"""

from __future__ import annotations

import importlib
from typing import cast

from gradring.bench.systems.system import Peer, Reduction, System

PEERS = ("tensorflow",)
"""Names of the peers and of their modules in this package."""

__all__ = ["PEERS", "Peer", "Reduction", "System", "load_peer"]


def load_peer(name: str) -> Peer:
    """The module of one of :data:`PEERS`; imports nothing of the peer itself."""
    return cast(Peer, importlib.import_module(f"{__name__}.{name}"))
