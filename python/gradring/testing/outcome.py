"""Outcomes of ranks, and the exceptions that report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradring.config import words
from gradring.config.words import agreed
from gradring.launch.processes import describe_exit
from gradring.launch.report import first_cause

#: Last lines of a failed rank's output that its report shows.
OUTPUT_LINES = 30


class RemoteError(Exception):
    """Replaces a rank's exception that could not be pickled; its text is the traceback.

    It also replaces a result that is missing or cannot be unpickled.

    Examples:
        >>> import os
        >>> outcomes = gradring.testing.run_ranks(os._exit, 2, 0, check=False)
        >>> outcomes[1].exception
        RemoteError('rank 1 ended with exit code 0 before its function returned')
    """


@dataclass(frozen=True)
class Outcome:
    """The result or failure of one rank.

    Attributes:
        rank: The rank.
        value: The function's result; None if it did not return.
        exception: The function's exception; None if it returned or the process died.
        exit_code: Exit code of its process; minus the signal's number if a signal killed it.
        output: The process's stdout and stderr, at most the last MiB.
        traceback: Text of the exception's traceback in that process.
        ended_by_harness: True if ``run_ranks`` killed it, after a timeout or another rank's
            failure.
        is_shown: True if the output was shown while the rank ran; errors then do not repeat it.

    Examples:
        >>> import os
        >>> outcomes = gradring.testing.run_ranks(os.listdir, 2, "/missing", check=False)
        >>> outcomes[1].ok, outcomes[1].exit_code
        (False, 1)
        >>> outcomes[1].exception
        FileNotFoundError(2, 'No such file or directory')
        >>> outcomes[1].summary()
        "rank 1: FileNotFoundError: [Errno 2] No such file or directory: '/missing'"
        >>> outcomes[1].details().splitlines()[0]
        'Traceback (most recent call last):'
    """

    rank: int
    value: Any
    exception: BaseException | None
    exit_code: int
    output: str
    traceback: str = ""
    ended_by_harness: bool = False
    is_shown: bool = False

    @property
    def ok(self) -> bool:
        """True if the function returned and the process ended normally."""
        return self.exception is None and self.exit_code == 0

    def summary(self) -> str:
        """Returns one line, such as ``rank 1: ValueError: no such layer``."""
        if self.ok:
            return f"rank {self.rank}: returned"
        if isinstance(self.exception, SystemExit):
            ended = describe_exit(self.exit_code)
            return f"rank {self.rank}: SystemExit before its function returned ({ended})"
        if self.exception is not None:
            kind = type(self.exception).__name__
            words = str(self.exception).strip().splitlines() or [""]
            return f"rank {self.rank}: {kind}: {words[-1]}"
        ended = " by run_ranks" if self.ended_by_harness else ""
        return f"rank {self.rank}: {describe_exit(self.exit_code)}{ended}"

    def details(self) -> str:
        """Returns the traceback and the last lines of output; empty if the output was shown."""
        if self.is_shown:
            return ""
        parts = [self.traceback.rstrip()] if self.traceback else []
        # The output contains the traceback too.
        output = self.output.replace(self.traceback, "") if self.traceback else self.output
        lines = output.rstrip().splitlines()[-OUTPUT_LINES:]
        if lines:
            parts.append("\n".join([f"last output of rank {self.rank}:", *lines]))
        return "\n".join(parts)


class RankFailure(Exception):
    """A rank raised, exited, or its process died; the message names the rank that failed first.

    Attributes:
        rank: The rank that failed first.
        outcomes: The outcome of every rank, in rank order.

    Examples:
        >>> import os
        >>> try:
        ...     gradring.testing.run_ranks(os.listdir, 2, "/missing")
        ... except gradring.testing.RankFailure as failure:
        ...     failure.rank in (0, 1)
        ...     [outcome.ok for outcome in failure.outcomes]
        True
        [False, False]
    """

    def __init__(
        self,
        rank: int,
        outcomes: Sequence[Outcome],
        headline: str = "",
        detailed: Sequence[int] = (),
    ) -> None:
        """Makes the message, with the details of the ranks ``detailed``, or of ``rank``.

        Args:
            rank: The rank that failed first.
            outcomes: The outcome of every rank, in rank order.
            headline: First line of the message; default: one that names ``rank``.
            detailed: Ranks whose tracebacks and output the message shows; default: only ``rank``.
        """
        self.rank = rank
        self.outcomes = list(outcomes)
        headline = headline or f"rank {rank} failed first"
        shown = [outcome.summary() for outcome in self.outcomes]
        details = [self.outcomes[one].details() for one in detailed or [rank]]
        super().__init__("\n".join([headline, *shown, *filter(None, details)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of the constructor, which makes the message again."""
        return type(self), (self.rank, self.outcomes)


class RankTimeout(RankFailure, TimeoutError):
    """Some ranks had not finished in time, and were killed.

    Attributes:
        ranks: The ranks that had not finished.
        timeout: The time limit in seconds.

    Examples:
        >>> import time
        >>> try:
        ...     gradring.testing.run_ranks(time.sleep, 2, 60, timeout=1.0)
        ... except gradring.testing.RankTimeout as failure:
        ...     failure.ranks, failure.timeout
        ...     print(failure)
        ([0, 1], 1.0)
        ranks 0 and 1 of 2 had not finished after 1 s and were killed; ...
    """

    def __init__(self, ranks: Sequence[int], outcomes: Sequence[Outcome], timeout: float) -> None:
        """Makes the message from the outcomes; the details are those of all ``ranks``.

        Args:
            ranks: The ranks that had not finished, at least one.
            outcomes: The outcome of every rank, in rank order.
            timeout: The time limit in seconds.
        """
        self.ranks = list(ranks)
        self.timeout = timeout
        were = agreed(len(self.ranks), "was", "were")
        where = "above" if outcomes[self.ranks[0]].is_shown else "below"
        headline = (
            f"{words.ranks(self.ranks)} of {len(outcomes)} had not finished after {timeout:g} s "
            f"and {were} killed; see where they were {where}, or give a larger timeout"
        )
        super().__init__(self.ranks[0], outcomes, headline, self.ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments of the constructor, which makes the message again."""
        return type(self), (self.ranks, self.outcomes, self.timeout)


def first_failure(outcomes: Sequence[Outcome], ended_at: Sequence[float]) -> Outcome | None:
    """Returns the most likely cause of all failures; None if no rank failed by itself.

    The cause is the earliest failure, without ranks that blame another failed rank (a survivor's
    PeerLostError) and ranks that ``run_ranks`` killed.

    Args:
        outcomes: All outcomes, in rank order.
        ended_at: Time of each rank's failure or end, in seconds.
    """
    failed = [o for o in outcomes if not o.ok and not o.ended_by_harness]
    failed.sort(key=lambda o: ended_at[o.rank])
    return outcomes[first_cause({o.rank: _blamed(o) for o in failed})] if failed else None


def _blamed(outcome: Outcome) -> int | None:
    blamed = getattr(outcome.exception, "rank", None)
    return blamed if isinstance(blamed, int) else None
