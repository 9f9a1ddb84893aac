"""A rank that dies in the middle of any collective is named on every other rank.

The fault matrix has every fault in every phase of an all-reduce; here is every other collective.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import GradringError
from gradring.testing import run_ranks
from support.chosen import marked_rows

#: Of float32: 48 MiB, which takes much longer than to send a signal.
ELEMENTS = 12 << 20
WORLD_SIZE = 3
FAULTY = 1
ROOTED = ("broadcast", "reduce", "gather", "scatter")
WITHOUT_ROOT = ("reduce_scatter", "all_gather", "all_to_all", "all_to_all with splits")
CASES = [
    *((name, root, over) for name in ROOTED for root in (0, FAULTY) for over in ("tcp", "shm")),
    *((name, 0, over) for name in WITHOUT_ROOT for over in ("tcp", "shm")),
]
#: Each collective once, over one transport or the other, with one root or the other.
QUICK = [
    *(("broadcast", 0, "tcp"), ("reduce", FAULTY, "shm"), ("gather", 0, "shm")),
    *(("scatter", FAULTY, "tcp"), ("reduce_scatter", 0, "tcp"), ("all_gather", 0, "shm")),
    *(("all_to_all", 0, "tcp"), ("all_to_all with splits", 0, "shm")),
]


def struck(name: str, root: int) -> Any:
    """The kind of the error that this rank gets, and whom it blames."""
    comm = gradring.init()
    x = np.ones(ELEMENTS, np.float32)
    name, _, with_splits = name.partition(" with ")
    start = getattr(comm, f"{name}_async")
    arguments: dict[str, Any] = {"root": root} if name in ROOTED else {}
    if with_splits:
        # Each has most for the faulty one, which has most for itself.
        arguments["splits"] = [ELEMENTS // 4, ELEMENTS // 2, ELEMENTS // 4]
    comm.barrier()
    try:
        work = start(x, **arguments)
        if comm.rank == FAULTY:
            time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
        comm.barrier()  # where a rank is told that had done its part
    except GradringError as error:
        return type(error).__name__, error.rank
    finally:
        comm.close()
    return "nothing"


@pytest.mark.parametrize(
    ("name", "root", "transport"),
    marked_rows(CASES, QUICK),
)
def test_a_rank_that_dies_in_a_collective_is_named(name: str, root: int, transport: str) -> None:
    env = {"GRADRING_TRANSPORT": transport}
    outcomes = run_ranks(struck, WORLD_SIZE, name, root, env=env, check=False)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != FAULTY]
    for outcome in survivors:
        assert outcome.value == ("PeerLostError", FAULTY), outcome
