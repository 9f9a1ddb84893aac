"""Comparison of the ranks' weights.

Synchronous replicas start with equal weights and apply equal updates, so their weights must stay
equal to the last bit. Causes of a difference raise no error: an update on one rank alone, a random
number, another processor's library, a memory error. The comparison takes one digest of everything
in a reduction of 48 bytes. Only if ranks differ, they compare one hash for each array.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gradring.errors import MismatchError
from gradring.group.collectives import named
from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different

#: Length of a hash; different contents have equal hashes once in 2**64.
_HASH_BYTES = 8


def check_equal(
    communicator: Communicator, arrays: Mapping[str, NDArray[np.generic]], name: str
) -> None:
    """Compares arrays whose bits must be equal on all ranks; every rank must call it.

    Args:
        communicator: The ranks.
        arrays: Arrays by name, in the same order on every rank; any dtype of fixed width, any
            shape.
        name: Name of the arrays, such as "weights"; shown in messages and compared between ranks.

    Raises:
        MismatchError: Some arrays differ; raised on every rank. It names the first array that
            differs, and the ranks that differ from the majority. The group stays usable.
    """
    hashes = np.array([hash_of(array) for array in arrays.values()], np.int64)
    label = f"check of {len(arrays)} {name}"
    texts = gather_if_different(communicator, hashes.tobytes(), label)
    if texts is None:
        return
    found = np.stack([np.frombuffer(text, np.int64) for text in texts])
    different = np.flatnonzero((found != found[0]).any(axis=0))
    first = found[:, different[0]].tolist()
    # If two values are equally frequent, the one of the lowest rank counts as right.
    usual = max(Counter(first).items(), key=lambda item: (item[1], -first.index(item[0])))[0]
    ranks = [rank for rank, value in enumerate(first) if value != usual]
    hosts = communicator.hosts
    names = ", ".join(named(communicator, rank) for rank in ranks)
    array = list(arrays)[different[0]]
    raise MismatchError(
        f"{name}: the replicas differ. '{array}' is the first of {len(different)} that do, of "
        f"{len(arrays)}; {names} has other contents than "
        f"{named(communicator, first.index(usual))}. Find code that only one rank runs, such as "
        "an update outside of the strategy or an unseeded random number, and continue from an "
        "earlier checkpoint",
        rank=ranks[0],
        host=hosts[ranks[0]],
    )


def hash_of(array: NDArray[np.generic]) -> int:
    """Returns a hash of the array's dtype, shape and bits, as a signed number of 64 bits."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little", signed=True)
