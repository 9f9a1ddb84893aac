"""The exceptions of gradring: each is also the builtin that a caller would expect.

Every message names the rank, the host and the operation it blames and ends with what to do next.
The same facts are attributes, so that a program can act on them without parsing text::

    try:
        comm.all_reduce(gradients)
    except gradring.errors.PeerLostError as error:
        print(error.rank, error.host, error.collective)
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "AuthenticationError",
    "CollectiveTimeoutError",
    "ConfigError",
    "GradringError",
    "MismatchError",
    "PeerLostError",
    "ProtocolError",
    "RendezvousError",
    "RestoreError",
    "SaveError",
]


class GradringError(Exception):
    """Base of every exception that gradring raises on purpose.

    Attributes:
        rank: The rank that is blamed, or None when no single rank is. In a group of `split` it is
            one of that group; the message says the group, and what its ranks are in the world.
        host: The host of that rank: its name, or its address where the name is not known.
        collective: The collective during which it happened, such as
            ``all_reduce 'dense/kernel' float32[98]``.
        sequence: Ordinal of that collective.
        elapsed_s: How long the operation had been under way, in seconds.
    """

    #: For TensorFlow's AutoGraph, which would raise a `StagingError` in its place.
    ag_pass_through = True

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        collective: str | None = None,
        sequence: int | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        """Makes the exception; every fact that is not known stays None."""
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.collective = collective
        self.sequence = sequence
        self.elapsed_s = elapsed_s


class ConfigError(GradringError, ValueError):
    """A setting cannot be used, or two settings contradict each other."""


class RendezvousError(GradringError, ConnectionError):
    """The ranks could not find each other in time."""


class AuthenticationError(GradringError, PermissionError):
    """A peer could not prove that it knows the job's token."""


class MismatchError(GradringError, ValueError):
    """Ranks called different collectives at the same position."""


class PeerLostError(GradringError, ConnectionError):
    """A rank has gone."""


class CollectiveTimeoutError(GradringError, TimeoutError):
    """A rank is alive but did not take part in a collective in time; or a wait was too short."""


class AbortedError(GradringError, RuntimeError):
    """The communicator was aborted or closed."""


class ProtocolError(GradringError, RuntimeError):
    """Bytes arrived that no correct peer sends, or the engine itself failed."""


class SaveError(GradringError, OSError):
    """A rank could not save a model or a checkpoint; raised on all of them."""


class RestoreError(GradringError, OSError):
    """A model or a checkpoint could not be restored; raised on all ranks."""


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
