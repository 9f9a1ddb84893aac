"""What has to be the same on all ranks of an elastic job, also on those that join."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from gradring.collectives import all_gather_bytes
from gradring.communicator import Communicator
from gradring.errors import GradringError, MismatchError


def compare(communicator: Communicator, own: Mapping[str, str], has_state: bool) -> bool:
    """Every rank must call it; ``has_state`` says that this one has the job's values already.

    Returns:
        Whether all have.

    Raises:
        gradring.errors.MismatchError: On all ranks, if those differ that have the job's values;
            otherwise on one that would join, and the others go on without it.
    """
    text = json.dumps([has_state, own]).encode()
    told = [json.loads(each) for each in all_gather_bytes(communicator, text, "elastic/alike")]
    of_job = [rank for rank, (has_its_state, _) in enumerate(told) if has_its_state]
    hosts, first = communicator.hosts, of_job[0]
    for rank in of_job if has_state else [communicator.rank]:
        for name, value in told[first][1].items():
            other = told[rank][1].get(name)
            if other != value:
                if len(of_job) == len(told):
                    # All raise. Who is first must not end the group before all have been told.
                    with contextlib.suppress(GradringError):
                        communicator.barrier()
                raise MismatchError(
                    f"{communicator._named(rank)} has {name}={other}, and "
                    f"{communicator._named(first)} has {name}={value}; give every rank of the job "
                    "the same",
                    rank=rank,
                    host=hosts[rank],
                )
    return len(of_job) == len(told)
