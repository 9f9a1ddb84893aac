"""Negotiation: what ranks are about to call, compared before anything of it is sent.

Horovod negotiates before every collective. Here that is one reduction of 48 bytes; only where calls
differ do ranks tell each other what they call. So a difference is an exception on every rank that
leaves the group as it was, and a rank that has joined hears to what it has to contribute.

Inside a `tf.function` there is no such step: there, calls have the order in which they were traced,
and the core compares them. What a session of TensorFlow 1 is about to run is one call with parts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different

#: What a rank is about to do whose session executes collectives, which are the parts.
RUN = "a run of a session"


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        kind: The function.
        name: The program's name for it, or the function's.
        how: The reduce op, or the root, where the function has one.
        dtypes: Of the tensors.
        shapes: As far as they are known and have to be the same on all ranks; None elsewhere.
        variables: Names of what the tensors are of, where they are known.
        shown: What it is called in messages; ranks may differ in it. Default: `name`.
        parts: What it consists of, in this order.
    """

    kind: str
    name: str = ""
    how: str = ""
    dtypes: Sequence[str] = ()
    shapes: Sequence[Sequence[int | None] | None] = ()
    variables: Sequence[str] | None = None
    shown: str = ""
    parts: Sequence[Call] = ()

    @classmethod
    def of(cls, text: bytearray) -> Call:
        """What `encoded` made a text of."""
        call = cls(**json.loads(text))
        return replace(call, parts=[cls(**part) for part in cast("list[Any]", call.parts)])

    def encoded(self) -> bytes:
        """The same text for the same call."""
        return json.dumps(asdict(self)).encode()

    def is_like(self, other: Call) -> bool:
        """Whether both are the same, whatever they are called in messages."""
        return _compared(self) == _compared(other)

    def without_equal_parts(self, other: Call) -> Call:
        """The same with the first part, and what is behind it, that differs from the other's."""
        pairs = zip(self.parts, other.parts, strict=False)
        equal = itertools.takewhile(lambda pair: pair[0].is_like(pair[1]), pairs)
        return replace(self, parts=self.parts[len(list(equal)) :])

    def __str__(self) -> str:
        if self.kind == RUN and not self.parts:
            return f"{self.kind} without more"
        if self.parts:
            more = f" and then {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
            return f"{self.kind} with {self.parts[0]}{more}"
        tensors = [
            f"{dtype}[{_sizes(shape)}]"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        how = f" ({self.how})" if self.how else ""
        name = repr(self.shown or self.name)
        return f"{self.kind}{how} {name} {', '.join(tensors[:3])}{more}".rstrip()


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
        if not calls[rank].is_like(calls[present[0]]):
            return present[0], rank
    return None


def joined(calls: Sequence[Call]) -> list[int]:
    """The ranks that have joined."""
    return sorted(set(range(len(calls))) - set(_present(calls)))


def _sizes(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return "..."
    return ", ".join("any" if size is None else str(size) for size in shape)


def _compared(call: Call) -> dict[str, Any]:
    facts = asdict(replace(call, shown="", parts=[replace(part, shown="") for part in call.parts]))
    compared: dict[str, Any] = json.loads(json.dumps(facts))
    return compared


def _present(calls: Sequence[Call]) -> Iterator[int]:
    return (rank for rank, call in enumerate(calls) if call.kind != JOIN.kind)
