"""One step of a program, and what becomes of an exception that leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gradring import _native

#: Names of exceptions that say that there are no more data.
_END_OF_DATA = frozenset({"StopIteration", "StopAsyncIteration", "OutOfRangeError"})

#: Of an exception's text.
_LINES_MAX = 3


class Group(Protocol):
    """What a step needs of a `Communicator`."""

    world_size: int
    _native: _native.Communicator
    #: The step that the program is in.
    _step: Step | None

    def abort(self, reason: str) -> None:
        """As `Communicator.abort`."""


@dataclass(eq=False)
class Step:
    """What `Communicator.step` returns; inside another one it does nothing."""

    _communicator: Group
    _abort_on_exception: bool

    def __enter__(self) -> None:
        communicator = self._communicator
        if communicator._step is None:
            communicator._native.begin_step(not self._abort_on_exception)
            communicator._step = self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        communicator = self._communicator
        if communicator._step is not self:
            return
        communicator._step = None
        # By the program's own words, an exception may be an end like another.
        left = described(error) if error is not None and self._abort_on_exception else None
        number, launched = communicator._native.end_step(left)
        if left is not None and launched and ends_the_group(error):
            abort(communicator, f"its step {number}", launched, left)


def abort(communicator: Group, what: str, launched: int, left: str) -> None:
    """Ends the group because an exception, `left`, has left `what` after some collectives."""
    if communicator.world_size == 1:
        return
    communicator.abort(
        f"{what} was left by {left} after {launched} of its collectives had begun, so the ranks "
        "would go on with results of different steps. Mend what it names and restart; if every "
        "rank leaves such a step alike, run it inside "
        "`with communicator.step(abort_on_exception=False)`"
    )


def described(error: BaseException) -> str:
    """The exception in one line: the beginning and the end of a long text, such as TensorFlow's."""
    try:
        text = str(error)
    except Exception:  # of the program's own class; it must not take this one's place
        text = "<exception str() failed>"
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if len(lines) > _LINES_MAX:
        lines = [lines[0], "...", *lines[1 - _LINES_MAX :]]
    return ": ".join([type(error).__name__, " ".join(lines)] if lines else [type(error).__name__])


def ends_the_group(error: BaseException | None) -> bool:
    """Whether this exception must not leave a step alone, once it has reduced something.

    All ranks see the end of the data, and those who want this process to end see to it elsewhere.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, Exception) and names.isdisjoint(_END_OF_DATA)
