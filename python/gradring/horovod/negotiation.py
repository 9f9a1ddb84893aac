"""Negotiation: what ranks are about to call, compared before anything of it is sent.

Horovod negotiates before every collective. Here that is one reduction of 48 bytes; only where calls
differ do ranks tell each other what they call. So a difference is an exception on every rank that
leaves the group as it was, and a rank that has joined hears to what it has to contribute.

Inside a `tf.function` there is no such step: there, calls have the order in which they were traced,
and the core compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        kind: The function.
        name: The program's name for it, or the function's.
        how: The reduce op, or the root, where the function has one.
        dtypes: Of the tensors.
        shapes: As far as they have to be the same on all ranks; None elsewhere.
        variables: Names of what the tensors are of, where they are known.
    """

    kind: str
    name: str = ""
    how: str = ""
    dtypes: Sequence[str] = ()
    shapes: Sequence[Sequence[int | None]] = ()
    variables: Sequence[str] | None = None

    @classmethod
    def of(cls, text: bytearray) -> Call:
        """What `encoded` made a text of."""
        return cls(**json.loads(text))

    def encoded(self) -> bytes:
        """The same text for the same call."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        tensors = [
            f"{dtype}[{', '.join('any' if size is None else str(size) for size in shape)}]"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        how = f" ({self.how})" if self.how else ""
        return f"{self.kind}{how} {self.name!r} {', '.join(tensors[:3])}{more}".rstrip()


#: What a rank calls that has no more data.
JOIN = Call("join")


def negotiate(communicator: Communicator, own: Call) -> list[Call]:
    """What all ranks call, by rank; every rank calls this.

    Args:
        communicator: The group.
        own: What this rank calls.
    """
    texts = gather_if_different(communicator, own.encoded(), "horovod/calls")
    return [own] * communicator.world_size if texts is None else list(map(Call.of, texts))


def differing(calls: Sequence[Call]) -> tuple[int, int] | None:
    """The first two ranks whose calls differ, of those that have not joined; None if none do."""
    present = list(_present(calls))
    for rank in present[1:]:
        if calls[rank].encoded() != calls[present[0]].encoded():
            return present[0], rank
    return None


def joined(calls: Sequence[Call]) -> list[int]:
    """The ranks that have joined."""
    return sorted(set(range(len(calls))) - set(_present(calls)))


def _present(calls: Sequence[Call]) -> Iterator[int]:
    return (rank for rank, call in enumerate(calls) if call.kind != JOIN.kind)
