"""Comparison of what has to be the same on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Mapping

import numpy as np

from gradring.errors import GradringError, MismatchError
from gradring.group.collectives import Collectives, all_gather_bytes, named

#: Of a digest, in words of 8 bytes.
_WORDS = 3

_must_match: weakref.WeakKeyDictionary[Collectives, dict[str, str]] = weakref.WeakKeyDictionary()


def must_match(communicator: Collectives) -> dict[str, str]:
    """What front ends note to be the same on every rank, by name; `elastic.run` compares it."""
    return _must_match.setdefault(communicator, {})


def require_equal(
    communicator: Collectives,
    own: Mapping[str, str] | None,
    *,
    of: str = "",
    remedy: str = "give every rank of the job the same",
    standing: int = 0,
) -> list[int]:
    """Compares what has to be the same on all ranks; every rank must call it.

    Args:
        communicator: The ranks.
        own: What this rank has, by name; None on any rank: nothing is compared.
        of: The call that needs it, which begins the message and names the collective.
        remedy: The advice of the error.
        standing: Of this rank. Those that have the highest must be equal; any other rank must be
            as they are, and is alone told if it is not.

    Returns:
        The ranks of the highest standing.

    Raises:
        gradring.errors.MismatchError: Names the first rank that differs; on all ranks, if those of
            the highest standing do.
    """
    text = json.dumps([standing, own]).encode()
    name = f"{of}: arguments" if of else "require_equal"
    texts = gather_if_different(communicator, text, name)
    if texts is None:
        return list(range(communicator.world_size))
    told = [json.loads(each) for each in texts]
    if any(theirs is None for _, theirs in told):
        return list(range(communicator.world_size))
    highest = max(theirs for theirs, _ in told)
    counting = [rank for rank, (theirs, _) in enumerate(told) if theirs == highest]
    first = counting[0]
    prefix = f"{of}: " if of else ""
    for rank in counting if standing == highest else [communicator.rank]:
        for name, value in told[first][1].items():
            other = told[rank][1].get(name)
            if other != value:
                if len(counting) == len(told):
                    # All raise. Who is first must not end the group before all have been told.
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
    """The bytes of every rank, by rank, unless all have the same; every rank must call it.

    Where all have the same, that is one reduction of 48 bytes: the greatest digest of all ranks,
    and the least.

    Args:
        communicator: The ranks.
        own: What this rank has; lengths may differ.
        name: What is compared; compared itself, and used in messages.

    Returns:
        None where all have the same.
    """
    digest = np.frombuffer(hashlib.blake2b(own, digest_size=8 * _WORDS).digest(), np.int64)
    # ~x falls as x grows, so that its greatest belongs to the least x.
    words = np.concatenate([digest, ~digest])
    communicator.all_reduce(words, "max", name=name)
    if (words[:_WORDS] == ~words[_WORDS:]).all():
        return None
    return all_gather_bytes(communicator, own, f"{name}: each")
