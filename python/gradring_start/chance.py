"""Seeds of Python and numpy for `gradring verify`, before the program draws its first number.

Rank 0 begins with the seeds of the run on one process. Every other rank begins with seeds of its
own, as ranks without seeds do in any other run: what a program draws on each rank and needs to be
equal is then found. Seeds that the program sets itself take their place.
"""

import functools
import itertools
import os
import random
from types import ModuleType
from typing import Any


def seed() -> int:
    """The seed of this process: its rank."""
    return int(os.environ.get("GRADRING_RANK") or 0)


def seed_python() -> None:
    """Seeds the module `random`."""
    random.seed(seed())


def seed_numpy(numpy: ModuleType) -> None:
    """Seeds numpy's own numbers, and generators that are made without a seed."""
    own, made, original = seed(), itertools.count(), numpy.random.default_rng
    numpy.random.seed(own)

    @functools.wraps(original)
    def default_rng(seed: Any = None) -> Any:
        return original((own, next(made)) if seed is None else seed)

    setattr(numpy.random, "default_rng", default_rng)  # noqa: B010


def has_drawn(numpy: Any) -> bool:
    """Whether the program has drawn numpy's own numbers, or has set their seed."""
    now, begun = (it.get_state() for it in (numpy.random, numpy.random.RandomState(seed())))
    return repr(now) != repr(begun)
