"""One step of a program, and exceptions that leave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gradring import _native

#: Names of exceptions that mean the end of the data.
_END_OF_DATA = frozenset({"StopIteration", "StopAsyncIteration", "OutOfRangeError"})

#: Longest text of an exception in messages, in lines.
_LINES_MAX = 3


class Group(Protocol):
    """The part of a `Communicator` that a step uses."""

    world_size: int
    _native: _native.Communicator
    #: The step now running, if any.
    _step: Step | None

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`."""


@dataclass(eq=False)
class Step:
    """The context manager of `Communicator.step`; inside another step it does nothing."""

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
        # Without `abort_on_exception`, the program treats an exception as a normal end.
        left = described(error) if error is not None and self._abort_on_exception else None
        number, launched = communicator._native.end_step(left)
        if left is not None and launched and ends_the_group(error):
            abort(communicator, f"its step {number}", launched, left)


def abort(communicator: Group, what: str, launched: int, left: str) -> None:
    """Aborts the group because the exception `left` ended `what` after some collectives."""
    if communicator.world_size == 1:
        return
    communicator.abort(
        f"{what} was left by {left} after {launched} of its collectives had begun, so the ranks "
        "would continue with results of different steps. Fix this error and restart; if every "
        "rank raises it in the same step, run the step inside "
        "`with communicator.step(abort_on_exception=False)`"
    )


def described(error: BaseException) -> str:
    """Returns the exception in one line; a long text, as TensorFlow's, loses its middle."""
    try:
        text = str(error)
    except Exception:  # a faulty class of the program must not hide the first error
        text = "<exception str() failed>"
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if len(lines) > _LINES_MAX:
        lines = [lines[0], "...", *lines[1 - _LINES_MAX :]]
    return ": ".join([type(error).__name__, " ".join(lines)] if lines else [type(error).__name__])


def ends_the_group(error: BaseException | None) -> bool:
    """Returns True if an exception on one rank must abort the group after a collective.

    The end of the data reaches all ranks. KeyboardInterrupt and SystemExit come from a user or a
    launcher, which also ends the other ranks.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, Exception) and names.isdisjoint(_END_OF_DATA)
