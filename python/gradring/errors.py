"""The exceptions of gradring; each also has a fitting builtin exception as its base.

Every message names the blamed rank, its host and the operation, and ends with advice. The same
facts are attributes, so that programs need not parse the text.

Examples:
    >>> def train():  # it has a mistake
    ...     comm.all_reduce(np.ones(3 + rank, np.float32), name="gradients")
    >>> try:
    ...     train()
    ... except gradring.errors.AuthenticationError:
    ...     print("give all ranks the same token")
    ... except (gradring.errors.PeerLostError, gradring.errors.ProtocolError) as error:
    ...     print("restart from the last checkpoint, and look at", error.host)
    ... except (gradring.errors.SaveError, gradring.errors.RestoreError) as error:
    ...     print("look at the disk of", error.host)
    ... except gradring.errors.GradringError as error:
    ...     print(type(error).__name__, error.rank, error.host, error.collective)
    MismatchError 1 ... all_reduce(sum) 'gradients' float32[3]
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
__dir__ = __all__.copy


class GradringError(Exception):
    """The base of all exceptions of gradring.

    Attributes:
        problem: The message without the advice.
        advice: The next thing to do. The message consists of problem and advice. Empty if the
            problem includes advice.
        rank: The blamed rank; None if no single rank is to blame. In a group made by `split`, it is
            a rank of that group; the message has the group's name and the rank in the world.
        host: The host of that rank: its name, or its address if the name is not known.
        collective: The collective in which the error occurred, such as ``all_reduce(sum)
            'dense/kernel' float32[98]``.
        sequence: Ordinal of that collective.
        elapsed_s: Duration of the operation until the error, in seconds.

    Examples:
        >>> try:
        ...     comm.broadcast(np.ones(3 + rank, np.float32), name="weights")
        ... except gradring.GradringError as error:
        ...     error.rank, error.host, error.collective, error.sequence, error.elapsed_s
        ...     error.advice
        (1, '...', "broadcast(root=0) 'weights' float32[3]", 1, 0...)
        'make every rank call the same collectives, with the same shapes, in the same order'
    """

    #: Attribute for TensorFlow's AutoGraph, which would otherwise raise a `StagingError`.
    ag_pass_through = True

    def __init__(
        self,
        problem: str,
        *,
        advice: str = "",
        rank: int | None = None,
        host: str | None = None,
        collective: str | None = None,
        sequence: int | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        """Makes the exception; facts that are not known are None."""
        super().__init__(f"{problem}; {advice}" if advice else problem)
        self.problem = problem
        self.advice = advice
        self.rank = rank
        self.host = host
        self.collective = collective
        self.sequence = sequence
        self.elapsed_s = elapsed_s


class ConfigError(GradringError, ValueError):
    """A setting is invalid, or two settings contradict each other.

    Examples:
        >>> gradring.init(transport="pigeons")
        Traceback (most recent call last):
            ...
        gradring.errors.ConfigError: transport='pigeons' is not one of auto, tcp, shm; correct it
    """


class RendezvousError(GradringError, ConnectionError):
    """The ranks could not find each other in time.

    Examples:
        >>> gradring.Communicator(rank=1, world_size=2, rendezvous="127.0.0.1:1", timeout=0.1)
        Traceback (most recent call last):
            ...
        gradring.errors.RendezvousError: rank 0 on 127.0.0.1:1: rank 1 cannot reach it at
        127.0.0.1:1: Connection refused ...; nothing listens there: start that rank, look at its
        output, or correct the address
    """


class AuthenticationError(GradringError, PermissionError):
    """A peer could not prove that it knows the job's token."""


class MismatchError(GradringError, ValueError):
    """Ranks called different collectives at the same position.

    Examples:
        >>> comm.all_reduce(np.ones(3 + rank, np.float32), name="gradients")
        Traceback (most recent call last):
            ...
        gradring.errors.MismatchError: all_reduce(sum) 'gradients' float32[3] (collective #1):
        rank 1 on ... called all_reduce(sum) 'gradients' float32[4]; the others called
        all_reduce(sum) 'gradients' float32[3] (rank 0)...; make every rank call the same
        collectives, with the same shapes, in the same order
    """


class PeerLostError(GradringError, ConnectionError):
    """A rank has left the group or was lost.

    Examples:
        >>> if rank == 1:
        ...     comm.close()  # it had fewer batches, say
        >>> comm.all_reduce(np.ones(3, np.float32), name="gradients")
        Traceback (most recent call last):
            ...
        gradring.errors.PeerLostError: all_reduce(sum) 'gradients' float32[3] (collective #1):
        rank 1 on ...: has closed its communicator while others still use it...; ...
    """


class CollectiveTimeoutError(GradringError, TimeoutError):
    """A rank is alive but did not enter a collective in time; or the timeout of a wait has passed.

    Examples:
        >>> if rank == 0:
        ...     comm.recv_async(np.empty(3), source=1).wait(timeout=0.1)  # rank 1 sends nothing
        Traceback (most recent call last):
            ...
        gradring.errors.CollectiveTimeoutError: recv(source=1) float64[3] (collective #1): has not
        ended within the 0.1 s of this wait ...; it goes on: wait again, or ask gradring doctor for
        whom it waits
    """


class AbortedError(GradringError, RuntimeError):
    """The communicator was aborted or closed.

    Examples:
        >>> comm.close()
        >>> comm.all_reduce(np.ones(3, np.float32))
        Traceback (most recent call last):
            ...
        gradring.errors.AbortedError: all_reduce(sum) float32[3] (collective #1): the communicator
        is closed; make a new communicator to go on
    """


class ProtocolError(GradringError, RuntimeError):
    """Bytes arrived that no correct peer sends, or gradring's engine failed."""


class SaveError(GradringError, OSError):
    """A rank could not save a model or a checkpoint; raised on all ranks.

    Examples:
        >>> comm.trace_start("/dev/null/timeline.json")
        >>> comm.trace_stop()  # rank 0 writes the file
        Traceback (most recent call last):
            ...
        gradring.errors.SaveError: rank 0 on ... could not write /dev/null/timeline.json: ...
    """


class RestoreError(GradringError, OSError):
    """A model or a checkpoint could not be restored; raised on all ranks."""
