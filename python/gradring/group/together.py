"""A block of code whose failure on one rank is raised on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gradring.errors import GradringError, SaveError
from gradring.group.collectives import Collectives, all_gather_bytes, named


@contextlib.contextmanager
def agreed(
    communicator: Collectives,
    verb: str,
    what: str | Path,
    error_type: type[GradringError] = SaveError,
) -> Iterator[None]:
    """Waits until every rank has left the block, and raises on all ranks if one has raised."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    words = f"{type(failure).__name__}: {failure}".encode() if failure else b""
    if isinstance(failure, OSError) and not isinstance(failure, GradringError):
        words += b"; look at that path, its permissions and the disk of that host"
    try:
        said = all_gather_bytes(communicator, words, f"{verb}/failure")
    except GradringError as error:
        # A rank failed in the middle of a collective, so the group has failed too.
        raise error from failure
    for rank, text in enumerate(said):
        if text:
            # The barrier keeps the first rank from closing the group before all have the error.
            with contextlib.suppress(GradringError):
                communicator.barrier()
            host = communicator.hosts[rank]
            sentence = f"{named(communicator, rank)} could not {verb} {what}: {text.decode()}"
            raise error_type(sentence, rank=rank, host=host) from failure
