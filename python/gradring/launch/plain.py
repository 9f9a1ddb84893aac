"""The policy of a plain job: one failure ends all ranks, which can be restarted together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradring.launch.hosts import Host
from gradring.launch.processes import RankProcess
from gradring.launch.report import Blame, first_cause
from gradring.launch.supervisor import Policy, Supervisor
from gradring_start import WITH_STRATEGY


class Plain(Policy):
    """Ranks that depend on each other."""

    def __init__(self, ranks: Sequence[Host], restarts: int) -> None:
        """Places the ranks.

        Args:
            ranks: The host of each rank.
            restarts: Maximum number of restarts of all ranks after a failure.
        """
        self.ranks = ranks
        self.restarts = restarts
        self._gives_strategy = False

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts all ranks."""
        super().begin(job, environ)
        self._gives_strategy = environ.get(WITH_STRATEGY) == "1"
        for rank, environment in enumerate(job.environments(environ)):
            job.start(rank, environment)

    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Returns every failure, because each one ends the job."""
        return [process for process in ended if process.exit_code != 0]

    def outcome(self) -> tuple[int, str | None]:
        """Returns success, with a warning if several ranks ran but none joined a group."""
        ranks = range(len(self.ranks))
        # Joining makes the failure file, which a full disk can leave empty.
        if len(ranks) == 1 or any(self._job.failure_of(rank).exists() for rank in ranks):
            return 0, None
        remedy = (
            "--with-strategy is for models of Keras that the program makes in no strategy of its "
            "own; leave that strategy out"
            if self._gives_strategy
            else "add --with-strategy, or use gradring.init() or a CustomCollectiveStrategy in the "
            "program"
        )
        return 0, (
            f"no rank joined a group, so each of the {len(ranks)} processes ran alone, unless they "
            f"met without gradring, as by a MultiWorkerMirroredStrategy; {remedy}"
        )

    def culprit(self, blames: Mapping[int, Blame | None]) -> tuple[int, str]:
        """Returns the first rank that blames no failed rank, and words for the rank it blames."""
        # An error without blame, or from the operating system, is better evidence than an abort.
        known = sorted(blames, key=lambda rank: (b := blames[rank]) is not None and not b.by_system)
        cause = first_cause({rank: b.rank if (b := blames[rank]) else None for rank in known})
        blame = blames[cause]
        if blame is None or blame.rank == cause or blame.rank >= len(self.ranks):
            return cause, ""
        process = self._job.processes.ranks[blame.rank]
        if other := blames.get(blame.rank):
            return cause, (
                f", but rank {blame.rank} on {process.host} is to blame ({blame.kind}), which "
                f"blames rank {other.rank}: the network of {process.host} may be cut"
            )
        ended = "had ended well" if process.exit_code == 0 else "still ran or was stopped"
        return cause, (
            f", but rank {blame.rank} on {process.host} is to blame ({blame.kind}), which {ended}"
        )
