"""Variables of ``keras.distribution.initialize``, by which launchers give Keras 3 its place."""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters.cluster import of_pair
from gradring.config import parse
from gradring.config.parse import Place

RANK, SIZE = "KERAS_DISTRIBUTION_PROCESS_ID", "KERAS_DISTRIBUTION_NUM_PROCESSES"
ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"


def rendezvous(environ: Mapping[str, str], place: Place | None = None) -> str | None:
    """Returns the first of ``KERAS_DISTRIBUTION_JOB_ADDRESSES``, or None if it is unset."""
    text = parse.value(environ, ADDRESSES)
    return None if text is None else parse.address(text.partition(",")[0], ADDRESSES)


ENVIRONMENT = of_pair(
    "Keras variables",
    RANK,
    SIZE,
    rendezvous,
    f"{ADDRESSES} is not; set it to the host:port at which rank 0 listens (or those of all ranks)",
    also=(ADDRESSES,),
)
