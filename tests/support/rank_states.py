"""States of the ranks of a running test, as they tell them."""

import functools
import os
from typing import Any

from gradring import _native
from support.waiting import wait_until

ANSWER_S = 5.0
STANDS_STILL_S = 0.5
"""Who has been in a call for so long waits in it."""


def state(address: str | None = None) -> dict[str, Any]:
    """Of the rank that listens at this address; default: rank 0."""
    token = os.environ["GRADRING_TOKEN"].encode()
    return _native.inquire(address or os.environ["GRADRING_RENDEZVOUS"], token, None, ANSWER_S)


def rank_0_waits() -> bool:
    """Whether rank 0 waits in its op, as it says itself."""
    return waits(None, "all_reduce")


def waits(address: str | None, call: str) -> bool:
    """Whether the rank at this address waits in such a call, as it says itself."""
    said = state(address)
    calls = [entered for entered in (said["entered"], said["beside"]) if entered]
    return any(name.startswith(call) and age > STANDS_STILL_S for _, name, age in calls)


def wait_until_all_others_wait(rank: int, call: str) -> None:
    """Returns when every rank but this one waits in such a call."""
    for other, (address, _) in enumerate(state()["members"]):
        if other != rank:
            wait_until(functools.partial(waits, address, call), f"rank {other} waits")
