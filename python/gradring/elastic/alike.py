"""What has to be the same on all ranks of an elastic job, also on those that join."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Mapping

from gradring.errors import GradringError, MismatchError
from gradring.group.collectives import all_gather_bytes
from gradring.group.communicator import Communicator


class Standing(enum.IntEnum):
    """Whose word counts in a group: that of those who have the highest."""

    JOINS = 0
    #: It has the job's values, and has yet to show that it does the same with them.
    ON_TRIAL = 1
    OF_JOB = 2


def compare(communicator: Communicator, own: Mapping[str, str], standing: Standing) -> list[int]:
    """Compares what has to be the same; every rank must call it.

    Returns:
        The ranks whose word counts.

    Raises:
        gradring.errors.MismatchError: On all ranks, if those differ whose word counts; otherwise on
            one that would join, and the others go on without it.
    """
    text = json.dumps([standing, own]).encode()
    told = [json.loads(each) for each in all_gather_bytes(communicator, text, "elastic/alike")]
    highest = max(theirs for theirs, _ in told)
    of_job = [rank for rank, (theirs, _) in enumerate(told) if theirs == highest]
    hosts, first = communicator.hosts, of_job[0]
    for rank in of_job if standing == highest else [communicator.rank]:
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
    return of_job
