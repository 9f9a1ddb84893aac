"""Results that no training has produced."""

from dataclasses import replace
from typing import Any

import numpy as np

from gradring.demo.results import RankResult, Results, Split


def rank_result(rank: int = 0, **changes: Any) -> RankResult:
    """A rank that trained well."""
    result = RankResult(
        rank=rank,
        host="node-a",
        samples_per_step=36,
        split=Split(compute_ms=6.0, communication_ms=1.0, waiting_ms=2.0),
        percentiles_ms=(9.0, 12.5, 30.0),
        local_ms=5.0,
        losses=(2.0, 1.0, 0.5, 0.25),
        accuracies=(0.5, 0.98),
        weights=(np.ones((2, 3), np.float32), np.zeros(4, np.float32)),
    )
    return replace(result, **changes)


def results(**changes: Any) -> Results:
    """A demo that went well."""
    ranks = (rank_result(0), rank_result(1))
    slow = Split(compute_ms=18.0, communication_ms=0.0, waiting_ms=0.0)
    whole = Results(
        gradring=ranks,
        mirrored=tuple(
            replace(rank, split=slow, percentiles_ms=(18.0, 20.0, 45.0)) for rank in ranks
        ),
        single=rank_result(samples_per_step=72, split=Split(8.0, 0.0, 0.0)),
        cores=2,
        others={"gradring": 0.02, "MultiWorkerMirrored": 0.03, "single process": 0.01},
    )
    return replace(whole, **changes)
