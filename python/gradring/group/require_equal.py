"""Comparison of values that must be equal on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Mapping

import numpy as np

from gradring.errors import GradringError, MismatchError
from gradring.group.collectives import Collectives, all_gather_bytes, named

#: Length of a digest in words of 8 bytes.
_WORDS = 3

_must_match: weakref.WeakKeyDictionary[Collectives, dict[str, str]] = weakref.WeakKeyDictionary()


def must_match(communicator: Collectives) -> dict[str, str]:
    """Returns the values by name that must be equal on all ranks; `elastic.run` compares them."""
    return _must_match.setdefault(communicator, {})


def require_equal(
    communicator: Collectives,
    own: Mapping[str, str] | None,
    *,
    of: str = "",
    remedy: str = "give every rank of the job the same",
    standing: int = 0,
) -> list[int]:
    """Compares values that must be equal on all ranks; every rank must call it.

    Args:
        communicator: The ranks.
        own: This rank's values by name. If it is None on any rank, nothing is compared.
        of: The calling function, for the message and the collective's name.
        remedy: The advice of the error.
        standing: This rank's standing. Ranks with the highest standing must be equal. A rank with a
            lower one must equal them too; if it differs, only that rank gets the error.

    Returns:
        The ranks of the highest standing.

    Raises:
        gradring.errors.MismatchError: Names the first rank that differs; raised on all ranks if
            they have equal standings.
    """
    text = json.dumps([standing, own]).encode()
    name = f"{of}: arguments" if of else "require_equal"
    texts = gather_if_different(communicator, text, name)
    if texts is None:
        return list(range(communicator.world_size))
    received = [json.loads(each) for each in texts]
    if any(theirs is None for _, theirs in received):
        return list(range(communicator.world_size))
    highest = max(theirs for theirs, _ in received)
    counting = [rank for rank, (theirs, _) in enumerate(received) if theirs == highest]
    first = counting[0]
    prefix = f"{of}: " if of else ""
    for rank in counting if standing == highest else [communicator.rank]:
        for name, value in received[first][1].items():
            other = received[rank][1].get(name)
            if other != value:
                if len(counting) == len(received):
                    # All ranks raise. The barrier keeps the first from closing the group too early.
                    with contextlib.suppress(GradringError):
                        communicator.barrier()
                raise MismatchError(
                    f"{prefix}{named(communicator, rank)} has {name}={other}, and "
                    f"{named(communicator, first)} has {name}={value}",
                    advice=remedy,
                    rank=rank,
                    host=communicator.hosts[rank],
                )
    return counting


def gather_if_different(communicator: Collectives, own: bytes, name: str) -> list[bytearray] | None:
    """Returns the bytes of every rank, or None if all are equal; every rank must call it.

    Equal bytes cost one reduction of 48 bytes: the greatest and the least digest of all ranks.

    Args:
        communicator: The ranks.
        own: This rank's bytes; lengths can differ.
        name: Name of the collective, itself compared across ranks and used in messages.

    Returns:
        The bytes by rank; None if all are equal.
    """
    digest = np.frombuffer(hashlib.blake2b(own, digest_size=8 * _WORDS).digest(), np.int64)
    # ~x falls as x grows, so the maximum of ~x gives the minimum of x.
    words = np.concatenate([digest, ~digest])
    communicator.all_reduce(words, "max", name=name)
    if (words[:_WORDS] == ~words[_WORDS:]).all():
        return None
    return all_gather_bytes(communicator, own, f"{name}: each")
