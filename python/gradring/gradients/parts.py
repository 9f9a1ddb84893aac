"""Division of variables into parts, one for each rank.

Variables are divided bucket by bucket, so that all ranks get about equal parts of each bucket. The
parts of a bucket are consecutive: a variable in the middle of a bucket often belongs to one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Variables with at least this number of rows for each rank are divided between rows, so that the
#: rows of a sparse gradient each belong to one rank.
ROWS_OF_A_RANK = 64

#: Parts begin at multiples of this number of elements or rows. The vector units of a processor then
#: handle the same elements together as without parts, so results have the same bits.
GRAIN = 16


@dataclass(frozen=True)
class Division:
    """Division of one variable among the ranks.

    Attributes:
        shape: Shape of the variable.
        is_by_rows: True if the parts are rows; False if they are elements.
        bounds: Number of the first row or element of each rank, and their total number.
    """

    shape: tuple[int, ...]
    is_by_rows: bool
    bounds: tuple[int, ...]

    @property
    def unit(self) -> int:
        """Number of elements of a row, or 1."""
        return math.prod(self.shape[1:]) if self.is_by_rows else 1

    def units(self, rank: int) -> range:
        """Returns the rows or elements of a rank."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def count(self, rank: int) -> int:
        """Returns the number of elements of a rank."""
        return len(self.units(rank)) * self.unit

    def has_all(self, rank: int) -> bool:
        """Returns whether a rank has the whole variable."""
        return self.count(rank) == math.prod(self.shape)

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part.

        Elements of a variable of several dimensions are a column, so the part has as many
        dimensions as the variable. The part of a scalar is a vector if it is empty.
        """
        if self.has_all(rank):
            return self.shape
        rest = self.shape[1:] if self.is_by_rows else (1,) * (len(self.shape) - 1)
        return (len(self.units(rank)), *rest)


def divide(shapes: Iterable[Sequence[int]], world_size: int) -> list[Division]:
    """Divides the variables of a bucket.

    The result depends on the arguments alone, so all ranks get the same divisions.

    Args:
        shapes: Shapes of the variables, in the order of the bucket.
        world_size: Number of ranks.

    Returns:
        A division for each variable.
    """
    whole = [tuple(shape) for shape in shapes]
    total = sum(map(math.prod, whole))
    targets = [total * rank // world_size for rank in range(world_size + 1)]
    divisions, start = [], 0
    for shape in whole:
        count = math.prod(shape)
        is_by_rows = len(shape) > 1 and shape[0] >= ROWS_OF_A_RANK * world_size and count > 0
        unit = math.prod(shape[1:]) if is_by_rows else 1
        bounds = [_nearest(target - start, count, unit) for target in targets]
        divisions.append(Division(shape, is_by_rows, (*bounds[:-1], count // unit)))
        start += count
    return divisions


def _nearest(element: int, count: int, unit: int) -> int:
    """Returns the place nearest to an element at which a part may begin, in units.

    A part that begins outside of the variable leaves it whole, so the parts of a bucket follow one
    another.
    """
    if not 0 < element < count:
        return 0 if element <= 0 else count // unit
    grain = GRAIN * unit
    return min((element + grain // 2) // grain * GRAIN, count // unit)
