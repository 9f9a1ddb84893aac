"""Description of a reduction by a front end, passed on from function to function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradring.gradients.buckets import DEFAULT_BUCKET_BYTES, Entry, pack
from gradring.gradients.checks import (
    NO_CHECK,
    Check,
    CheckGradients,
    Embeddings,
    check_embeddings,
    check_op,
)
from gradring.gradients.names import Label, Names
from gradring.group.communicator import Communicator


@dataclass(frozen=True)
class Collective:
    """One collective without its tensors.

    Attributes:
        communicator: The ranks that take part.
        label: Name of the collective.
        op: Name of the reduce op, if the collective reduces.
        check: Check of the tensors for NaN, infinity and equal ranks.
    """

    communicator: Communicator
    label: Label
    op: str = "sum"
    check: Check = NO_CHECK

    def part(self, name: str, op: str = "sum") -> Collective:
        """Returns a part or companion of this collective, without a check."""
        return Collective(self.communicator, self.label.part(name), op)


@dataclass(frozen=True)
class Reduction:
    """Description of how a list of tensors is reduced.

    Attributes:
        communicator: The ranks that take part.
        names: Names of the tensors.
        op: Name of the reduce op.
        bucket_bytes: Limit of the tensors that travel together, in bytes.
        check_gradients: Reaction to tensors with NaN or infinity: "warn", "raise" or None.
        embeddings: Treatment of rows of equal index: "rows" keeps them separate, "sum" adds them
            up.
        of_own_samples: True for gradients that each rank computes from its own samples. A warning
            tells if they are equal on all ranks.

    Raises:
        ConfigError: ``op`` or ``embeddings`` is unknown.
    """

    communicator: Communicator
    names: Names
    op: str = "sum"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    check_gradients: CheckGradients | None = None
    embeddings: Embeddings = "rows"
    of_own_samples: bool = False

    def __post_init__(self) -> None:
        check_op(self.op)
        check_embeddings(self.embeddings)

    def of(self, positions: Sequence[int], bucket: int | None = None) -> Collective:
        """Returns the collective that reduces the tensors at these positions.

        Args:
            positions: Positions in the list of tensors.
            bucket: Number of the bucket, if there are several.
        """
        names = self.names.each(positions)
        check = Check(self.check_gradients or "", names, self.of_own_samples)
        return Collective(self.communicator, self.names.of(positions, bucket), self.op, check)

    def buckets(self, entries: Mapping[int, Entry]) -> list[tuple[list[int], Collective]]:
        """Groups tensors into buckets.

        Args:
            entries: Entries by position in the list of tensors, in the order in which they become
                ready.

        Returns:
            For each bucket, in the order in which buckets become ready: the positions of its
            tensors, and the collective that reduces them.
        """
        positions = list(entries)
        packed = pack(entries.values(), self.bucket_bytes)
        members = [[positions[index] for index in bucket.indices] for bucket in packed]
        return [
            (tensors, self.of(tensors, number if len(packed) > 1 else None))
            for number, tensors in enumerate(members)
        ]
