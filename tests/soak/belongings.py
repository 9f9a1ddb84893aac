"""Belongings of this process that an endless program must not collect."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from support.proc import CLOSE_WAIT, descriptors, tcp_sockets

SETTLE_LIMIT_S = 4.0
"""How long what belongs to a group that has ended may take to disappear."""


@dataclass(frozen=True)
class Belongings:
    """What a process holds at one moment."""

    resident_kib: int
    descriptors: int
    threads: int
    mappings: int
    """Of memory shared by descriptor, the only kind there is."""
    half_closed: int
    """Sockets in CLOSE_WAIT."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Everything that is counted and not measured."""
        return astuple(self)[1:]

    def exceeds(self, usual: Belongings) -> bool:
        """Whether there is more of anything that is counted."""
        return any(now > then for now, then in zip(self.counts, usual.counts, strict=True))


def belongings() -> Belongings:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Belongings(
        resident_kib=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        descriptors=len(descriptors()),
        threads=len(os.listdir("/proc/self/task")),
        mappings=Path("/proc/self/maps").read_text().count("/memfd:"),
        half_closed=len(tcp_sockets(CLOSE_WAIT)),
    )


def settled(usual: Belongings | None) -> Belongings:
    """What is left when threads and sockets that are about to end have ended.

    Args:
        usual: What was left at the last such moment: more than that is waited for.
    """
    gc.collect()
    # What the allocator keeps for later is not held by anybody.
    ctypes.CDLL(None).malloc_trim(0)
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while True:
        found = belongings()
        if usual is None or not found.exceeds(usual) or time.monotonic() > deadline:
            return found
        time.sleep(0.01)
