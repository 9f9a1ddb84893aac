"""Seeds of Python and numpy, before a program draws its first number.

In `gradring verify`, rank 0 begins with the seeds of the run on one process. Every other rank
begins with other seeds, as ranks without seeds do in any run. Numbers that a program needs equal on
all ranks then show as a difference. Seeds that the program sets replace these.

Under ``GRADRING_WITH_STRATEGY``, all ranks of a job begin with equal seeds, derived from the job's
id. The program is written for one process, so the numbers by which it splits, shuffles or makes
data must be equal on all ranks. A process that a rank starts has other seeds.
"""

import functools
import hashlib
import logging
import os
import random
from types import ModuleType
from typing import Any

#: Variable with the job's id, which `gradring run` creates for each start of a job.
_JOB_ID = "GRADRING_JOB_ID"
#: Variable with the job and the process that have these seeds, for child processes.
_SEEDED = "_GRADRING_SEEDED"


def rank() -> int:
    """Returns the rank of this process."""
    return int(os.environ.get("GRADRING_RANK") or 0)


def begin(*, is_recorded: bool, is_shared: bool) -> None:
    """Seeds the module `random`, and sets the seed for `seed_numpy`.

    Args:
        is_recorded: True if `gradring verify` has started this process.
        is_shared: True to seed all ranks equally.
    """
    global _seed
    _seed = (0 if is_shared else rank()) if is_recorded else _seed_of_job()
    if _seed is not None:
        random.seed(_seed)


def _seed_of_job() -> int | None:
    """Returns a seed equal on all ranks; None without a job, and in a child of a rank."""
    job, own = os.environ.get(_JOB_ID), str(os.getpid())
    seeded, _, process = os.environ.get(_SEEDED, "").rpartition(" ")
    if not job or (seeded == job and process != own):
        return None
    os.environ[_SEEDED] = f"{job} {own}"
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little")


def seed_numpy(numpy: ModuleType) -> None:
    """Seeds numpy's global generator, and all generators that are created without a seed."""
    if _seed is None:
        return
    numpy.random.seed(_seed)
    source: Any = numpy.random.bit_generator
    if hasattr(source, "randbits"):
        # A `SeedSequence` without a seed takes it from this function.
        _restore_in_forks(source)
        source.randbits = random.Random(_seed).getrandbits
    else:
        logging.getLogger("gradring").warning(
            "numpy %s takes seeds from where gradring does not know, so generators without a seed "
            "differ between the ranks; give them one",
            numpy.__version__,
        )


@functools.cache
def _restore_in_forks(source: Any) -> None:
    """Has forks, such as processes that load data, draw other seeds than their parent."""
    restore = functools.partial(setattr, source, "randbits", source.randbits)
    os.register_at_fork(after_in_child=restore)


def has_drawn(numpy: Any) -> bool:
    """Returns whether the program used or seeded numpy's global generator."""
    now, begun = (it.get_state() for it in (numpy.random, numpy.random.RandomState(_seed)))
    return repr(now) != repr(begun)


#: Seed of this process; None without one.
_seed: int | None = None
