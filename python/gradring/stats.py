"""Types of the result of `Communicator.stats`; docs/observability.md defines its times."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["AlgorithmStats", "CollectiveStats", "RankStats", "SlowestRank", "Stats"]
__dir__ = __all__.copy


class CollectiveStats(TypedDict):
    """Successful collectives of one kind, or of all kinds.

    Attributes:
        count: Number of collectives.
        bytes: Bytes of their buffers.
        bytes_sent: Bytes of payload sent by this rank.
        time_s: Seconds in collectives: ``waiting_s + moving_s``.
        waiting_s: Seconds until the peers that this rank receives from had entered too.
        moving_s: Seconds of communication, from then to the end.
        algbw_gbps: ``bytes / time_s``, in 1e9 bytes/s.
        algorithm: The last one used.

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
    """One algorithm that was used, measured, chosen or configured.

    ``mapped`` stands for the direct algorithm over arrays of `Communicator.empty`.

    Attributes:
        count: Number of collectives that used it.
        bytes: Of their buffers.
        latency_s: Latency measured when the group formed; None if not measured.
        seconds_per_byte: Inverse bandwidth measured when the group formed, or None.
        chosen: Sizes of float32 sums that use it, and the reason, such as ``up to 21.3 KiB:
            measured 8.0 us + 0.60 ns/B against ...``; None if for none.

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
    """The rank for which the others have recently waited most.

    Attributes:
        rank: The rank.
        host: Its host.
        made_wait_s: The longest wait of a peer for it since the start, in seconds.
        recent_s: The wait in the last 5 to 10 seconds, minus its own waits, in seconds.

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
    """This rank's own counters, summed over all of its collectives.

    Attributes:
        collectives: The counters of each kind of collective, by its name.
        algorithms: The algorithms by name.
        exposed_s: Seconds in which the program was blocked by collectives.
        lateness_s: Seconds that this rank waited at the start of collectives for each peer that was
            the last to enter. In ``ring`` and ``hierarchical``, a rank only sees the lateness of
            its neighbours.
        lateness_recent_s: The same waits in the last 5 to 10 seconds.
        transport: ``tcp``, ``shm`` or ``shm+tcp``.
        streams: The setting.
        checksum: The setting.
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
    """The result of `Communicator.stats`.

    Attributes:
        slowest: The slowest of all ranks, by their status messages of about once a second; None if
            nobody waited.

    Examples:
        >>> x = comm.all_reduce(np.ones(3, np.float32))
        >>> gathered = comm.all_gather(np.arange(rank + 1))
        >>> stats: gradring.stats.Stats = comm.stats()
        >>> sorted(stats["collectives"])
        ['all_gather', 'all_reduce']
    """

    slowest: SlowestRank | None
