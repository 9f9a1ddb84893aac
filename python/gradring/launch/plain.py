"""The policy of a plain job: one failure ends all ranks, which may all start again together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradring.launch.hosts import Host
from gradring.launch.processes import RankProcess
from gradring.launch.report import Blame, first_cause
from gradring.launch.supervisor import Policy, Supervisor


class Plain(Policy):
    """Ranks that need each other."""

    def __init__(self, ranks: Sequence[Host], restarts: int) -> None:
        """Places the ranks.

        Args:
            ranks: The host of each.
            restarts: How often all start again when one has failed.
        """
        self.ranks = ranks
        self.restarts = restarts

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts all ranks."""
        super().begin(job, environ)
        for rank, environment in enumerate(job.environments(environ)):
            job.start(rank, environment)

    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Every failure ends the job."""
        return [process for process in ended if process.exit_code != 0]

    def outcome(self) -> tuple[int, str | None]:
        """Success; says so where no rank was in a group, which few mean."""
        ranks = range(len(self.ranks))
        # By the file that gradring makes then; a full disk may leave it empty.
        if len(ranks) == 1 or any(self._job.failure_of(rank).exists() for rank in ranks):
            return 0, None
        return 0, (
            f"no rank joined a group, so each of the {len(ranks)} processes ran alone, unless they "
            "met without gradring, as by a MultiWorkerMirroredStrategy; call gradring.init(), or "
            "make a gradring.tensorflow.CustomCollectiveStrategy, in the program"
        )

    def culprit(self, blames: Mapping[int, Blame | None]) -> tuple[int, str]:
        """The first that blames no other failed rank; names one that is to blame and goes on."""
        # A rank that blames none, or has it from its system, knows more than one that was told.
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
