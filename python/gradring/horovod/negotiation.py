"""Negotiation: comparison of the ranks' next calls before any data is sent.

Horovod negotiates before every collective. Here the comparison is one reduction of 48 bytes; only
if calls differ do ranks exchange them. So a difference raises an exception on every rank, and the
group stays usable. A rank that has called `join` learns from the exchange which reduction it must
contribute zeros to.

Calls inside a `tf.function` are not negotiated: they have the order of the trace, and the core
compares them. The next run of a session of TensorFlow 1 is one call with parts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different

#: Kind of a call for a run of a session, whose collectives are the parts.
RUN = "a run of a session"


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        kind: The function.
        name: The program's name for it, or the function's.
        how: The reduce op, or the root, where the function has one.
        dtypes: Dtypes of the tensors.
        shapes: Shapes of the tensors; None for sizes that are unknown or can differ between ranks.
        variables: Names of the variables that the tensors belong to, if known.
        shown: Name in messages, not compared between ranks. Default: `name`.
        parts: The collectives of a run, in order.
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
        """Decodes the result of `encoded`."""
        call = cls(**json.loads(text))
        return replace(call, parts=[cls(**part) for part in cast("list[Any]", call.parts)])

    def encoded(self) -> bytes:
        """Encodes the call; equal calls have equal texts."""
        return json.dumps(asdict(self)).encode()

    def is_like(self, other: Call) -> bool:
        """Returns True if the calls are equal, apart from their names in messages."""
        return _compared(self) == _compared(other)

    def without_equal_parts(self, other: Call) -> Call:
        """Returns the call without its first parts, up to the first that differs from `other`."""
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


#: The call of a rank without more data.
JOIN = Call("join")


def negotiate(communicator: Communicator, own: Call) -> list[Call]:
    """Returns the calls of all ranks, by rank; every rank must call it.

    Args:
        communicator: The group.
        own: This rank's call.
    """
    texts = gather_if_different(communicator, own.encoded(), "horovod/calls")
    return [own] * communicator.world_size if texts is None else list(map(Call.of, texts))


def differing(calls: Sequence[Call]) -> tuple[int, int] | None:
    """Returns the first two ranks with different calls, ignoring joined ranks; None without any."""
    present = list(_present(calls))
    for rank in present[1:]:
        if not calls[rank].is_like(calls[present[0]]):
            return present[0], rank
    return None


def joined(calls: Sequence[Call]) -> list[int]:
    """Returns the ranks that have joined."""
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
