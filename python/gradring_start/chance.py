"""Seeds of Python and numpy, before a program draws its first number.

In `gradring verify`, rank 0 begins with the seeds of the run on one process. Every other rank
begins with seeds of its own, as ranks without seeds do in any other run: what a program draws on
each rank and needs to be equal is then found. Seeds that the program sets itself take their place.

With ``GRADRING_WITH_STRATEGY``, all ranks of a job begin with the same seeds, which the job's id
gives. The program takes itself for one process, so the numbers by which it splits, shuffles or
makes its data must be the same on all ranks. A process that a rank starts keeps seeds of its own.
"""

import functools
import hashlib
import itertools
import os
import random
from types import ModuleType
from typing import Any

#: `gradring run` makes it anew for each start of a job.
_JOB_ID = "GRADRING_JOB_ID"
#: Job and process that have these seeds, for processes that it starts.
_SEEDED = "_GRADRING_SEEDED"


def rank() -> int:
    """The rank of this process."""
    return int(os.environ.get("GRADRING_RANK") or 0)


def begin(*, is_recorded: bool, is_shared: bool) -> None:
    """Seeds the module `random`, and whatever `seed_numpy` gets.

    Args:
        is_recorded: Whether `gradring verify` has started this process.
        is_shared: Whether all ranks are to have the same seeds.
    """
    global _seed
    _seed = (0 if is_shared else rank()) if is_recorded else _seed_of_job()
    if _seed is not None:
        random.seed(_seed)


def _seed_of_job() -> int | None:
    """The same on all ranks; None without a job, and in a process that a rank has started."""
    job, own = os.environ.get(_JOB_ID), str(os.getpid())
    seeded, _, process = os.environ.get(_SEEDED, "").rpartition(" ")
    if not job or (seeded == job and process != own):
        return None
    os.environ[_SEEDED] = f"{job} {own}"
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little")


def seed_numpy(numpy: ModuleType) -> None:
    """Seeds numpy's own numbers, and generators that are made without a seed."""
    if _seed is None:
        return
    own, made, original = _seed, itertools.count(), numpy.random.default_rng
    numpy.random.seed(own)

    @functools.wraps(original)
    def default_rng(seed: Any = None) -> Any:
        return original((own, next(made)) if seed is None else seed)

    setattr(numpy.random, "default_rng", default_rng)  # noqa: B010


def has_drawn(numpy: Any) -> bool:
    """Whether the program has drawn numpy's own numbers, or has set their seed."""
    now, begun = (it.get_state() for it in (numpy.random, numpy.random.RandomState(_seed)))
    return repr(now) != repr(begun)


#: None where nothing is seeded.
_seed: int | None = None
