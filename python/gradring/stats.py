"""Types of what `Communicator.stats` returns; docs/observability.md defines times, in seconds."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["AlgorithmStats", "CollectiveStats", "RankStats", "SlowestRank", "Stats"]


class CollectiveStats(TypedDict):
    """Collectives that ended well: those of one kind, or all.

    Attributes:
        count: How many.
        bytes: Of the buffers they worked on.
        bytes_sent: Of payload that this rank sent.
        time_s: In collectives: ``waiting_s + moving_s``.
        waiting_s: Until the peers that this rank receives from had entered as well.
        moving_s: Communication: from then to the end.
        algbw_gbps: ``bytes / time_s``, in 1e9 bytes/s.
        algorithm: The one used last.

    Examples:
        >>> x = comm.all_reduce(np.ones(1000, np.float32))
        >>> each: gradring.stats.CollectiveStats = comm.stats()["collectives"]["all_reduce"]
        >>> each["count"], each["bytes"], each["bytes_sent"]
        (1, 4000, 4000)
    """

    count: int
    bytes: int
    bytes_sent: int
    time_s: float
    waiting_s: float
    moving_s: float
    algbw_gbps: float
    algorithm: str


class AlgorithmStats(TypedDict):
    """One algorithm that was used, measured, chosen or wished for.

    Attributes:
        count: Of the collectives that used it.
        bytes: Of their buffers.
        latency_s: Measured when the group formed; None if it was not.
        seconds_per_byte: Measured likewise.
        chosen: For which sizes float32 sums use it, and why, such as
            ``up to 21.3 KiB: measured 8.0 us + 0.60 ns/B against ...``; None if for none.

    Examples:
        >>> x = comm.all_reduce(np.ones(2, np.float32))
        >>> stats = comm.stats()
        >>> used = stats["collectives"]["all_reduce"]["algorithm"]  # such as one_shot
        >>> each: gradring.stats.AlgorithmStats = stats["algorithms"][used]
        >>> each["count"], each["bytes"]
        (1, 8)
    """

    count: int
    bytes: int
    latency_s: float | None
    seconds_per_byte: float | None
    chosen: str | None


class SlowestRank(TypedDict):
    """The rank that keeps the others waiting most of late.

    Attributes:
        rank: Its rank.
        host: Its host.
        made_wait_s: The longest that a peer has waited for it since the start.
        recent_s: In the last 5 to 10 seconds, less what it has waited itself.

    Examples:
        >>> import time
        >>> if rank == 1:
        ...     time.sleep(0.2)  # such as for a slow disk
        >>> x = comm.all_reduce(np.ones(3, np.float32))
        >>> slowest: gradring.stats.SlowestRank | None = comm.stats()["slowest"]
        >>> slowest
        {'rank': 1, 'host': '...', 'made_wait_s': 0..., 'recent_s': 0...}
    """

    rank: int
    host: str
    made_wait_s: float
    recent_s: float


class RankStats(CollectiveStats):
    """What this rank has done and seen itself; all of its collectives together.

    Attributes:
        collectives: The same for each kind of collective, by its name.
        algorithms: By name.
        exposed_s: In which the program stood still for collectives.
        lateness_s: By peer: how long this rank waited at the start of collectives because that
            peer was the last to enter. With ``ring`` and ``hierarchical``, a rank hears from its
            neighbours only.
        lateness_recent_s: The same in the last 5 to 10 seconds.
        transport: ``tcp``, ``shm`` or ``shm+tcp``.
        streams: As given.
        checksum: As given.
        tcp_congestion: The TCP congestion controls of the connections between ranks that share no
            memory, each with the reason: ``{"reno": "same host"}``.

    Examples:
        >>> comm.barrier()
        >>> stats: gradring.stats.RankStats = comm.stats()
        >>> stats["count"], list(stats["collectives"]), list(stats["lateness_s"])
        (1, ['barrier'], [1])
    """

    collectives: dict[str, CollectiveStats]
    algorithms: dict[str, AlgorithmStats]
    exposed_s: float
    lateness_s: dict[int, float]
    lateness_recent_s: dict[int, float]
    transport: str
    streams: int
    checksum: bool
    tcp_congestion: dict[str, str]


class Stats(RankStats):
    """What `Communicator.stats` returns.

    Attributes:
        slowest: Over all ranks, by what they tell each other about once a second; None if no rank
            was waited for.

    Examples:
        >>> x = comm.all_reduce(np.ones(3, np.float32))
        >>> gathered = comm.all_gather(np.arange(rank + 1))
        >>> stats: gradring.stats.Stats = comm.stats()
        >>> sorted(stats["collectives"])
        ['all_gather', 'all_reduce']
    """

    slowest: SlowestRank | None


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
