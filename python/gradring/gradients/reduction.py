"""The description of a reduction by a front end; every function on the way hands it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradring.gradients.buckets import DEFAULT_BUCKET_BYTES, Entry, pack
from gradring.gradients.checks import NO_CHECK, Check, Embeddings, check_embeddings, check_op
from gradring.gradients.names import Label, Names
from gradring.group.communicator import Communicator


@dataclass(frozen=True)
class Collective:
    """One collective: everything but its tensors.

    Attributes:
        communicator: Over whose ranks.
        label: What it is called.
        op: Name of the reduce op, where it reduces.
        check: What to do about tensors that are not finite.
    """

    communicator: Communicator
    label: Label
    op: str = "sum"
    check: Check = NO_CHECK

    def part(self, name: str, op: str = "sum") -> Collective:
        """A part or a companion of this collective, which checks nothing."""
        return Collective(self.communicator, self.label.part(name), op)


@dataclass(frozen=True)
class Reduction:
    """How a list of tensors is reduced.

    Attributes:
        communicator: Over whose ranks.
        names: Of the tensors.
        op: Name of the reduce op.
        bucket_bytes: Bound on the tensors that travel together, in bytes.
        check_gradients: What to do about tensors that are not finite: "warn", "raise" or None.
        embeddings: What becomes of rows of equal index: "rows" keeps them apart, "sum" adds them
            up.

    Raises:
        ConfigError: ``op`` or ``embeddings`` is unknown.
    """

    communicator: Communicator
    names: Names
    op: str = "sum"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    check_gradients: str | None = None
    embeddings: Embeddings = "rows"

    def __post_init__(self) -> None:
        check_op(self.op)
        check_embeddings(self.embeddings)

    def of(self, positions: Sequence[int], bucket: int | None = None) -> Collective:
        """The collective that reduces the tensors at these positions.

        Args:
            positions: In the list of tensors.
            bucket: The bucket's number, if there are several.
        """
        check = Check(self.check_gradients or "", self.names.each(positions))
        return Collective(self.communicator, self.names.of(positions, bucket), self.op, check)

    def buckets(self, entries: Mapping[int, Entry]) -> list[tuple[list[int], Collective]]:
        """Which tensors travel together.

        Args:
            entries: By position in the list of tensors, in the order in which they become ready.

        Returns:
            For each bucket, in the order in which they become ready, the positions of its tensors,
            and the collective that reduces them.
        """
        positions = list(entries)
        packed = pack(entries.values(), self.bucket_bytes)
        members = [[positions[index] for index in bucket.indices] for bucket in packed]
        return [
            (tensors, self.of(tensors, number if len(packed) > 1 else None))
            for number, tensors in enumerate(members)
        ]
