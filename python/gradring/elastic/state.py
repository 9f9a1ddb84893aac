"""State: the values of a program that survive a loss, as of its last commit."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradring.config import parse
from gradring.elastic import commit as commits
from gradring.elastic.checkpoints import Checkpoints
from gradring.elastic.commit import HASH_BYTES, Commit, hash_of
from gradring.errors import ConfigError, MismatchError, ProtocolError, RestoreError, SaveError
from gradring.group.communicator import Communicator
from gradring.group.require_equal import require_equal
from gradring.group.together import agreed

#: Sent as the number of the newest commit by a rank that cannot read its checkpoints.
_UNREAD = -2


class State:
    """Values that all ranks have in common, and their last commit.

    Each value is an attribute. It is a numpy array, or a value that JSON restores unchanged:
    numbers, strings, booleans, None, and lists and dictionaries of these, with strings as keys.
    Other attributes are refused, because they would be lost.

    Examples:
        >>> state = gradring.elastic.State(weights=np.zeros(2), step=0)
        >>> state.checkpoint_to("checkpoints", every_commits=10)
        >>> state.sync(comm)
        >>> while state.step < 20:
        ...     state.weights -= 0.5 * comm.all_reduce(np.array([rank, 1.0]), op="mean")
        ...     state.step += 1
        ...     state.commit()
        >>> state.flush()
        >>> state.weights *= np.nan
        >>> state.restore()  # the last commit
        >>> state.weights, state.step
        (array([ -5., -10.]), 20)
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns a value, by the name that the program gave it."""

    def __init__(self, **values: Any) -> None:
        """Takes the values, as the first commit.

        Args:
            values: Values by name.

        Raises:
            gradring.errors.ConfigError: A value has the name of a method, or a name that begins
                with an underscore.
            TypeError: A value is neither an array of fixed width nor what JSON gives back
                unchanged.
        """
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise ConfigError(
                    f"a value of a State cannot be called {name!r}; choose another name"
                )
        self._names = tuple(values)
        self._checkpoints: Checkpoints | None = None
        self._every_commits = 1
        self._max_failures: int | None = None
        self._writes = False
        self._transfer: _Transfer | None = None
        #: Called by `gradring.elastic.run`'s job after a commit (True) or another point to
        #: regroup (False).
        self._after_commit: Callable[[bool], None] | None = None
        #: The group, inside `gradring.elastic.run`; None elsewhere.
        self._group: Communicator | None = None
        for name, value in values.items():
            setattr(self, name, value)
        first = self._values()
        self._commit = Commit.of(0, first)
        #: Dtypes and shapes of the program's arrays, by name. Later arrays may have other
        #: lengths.
        self._arrays = {name: _Kind.of(x) for name, x in first.items() if isinstance(x, np.ndarray)}

    def __setattr__(self, name: str, value: Any) -> None:
        """Changes a value.

        Raises:
            AttributeError: The state has no value of this name.
        """
        if not name.startswith("_") and name not in self._names:
            raise AttributeError(
                f"this State keeps {', '.join(self._names) or 'nothing'}, and would lose "
                f"{name!r} with a rank; give it to State(...) when you make it"
            )
        super().__setattr__(name, value)

    def commit(self) -> None:
        """Copies all values in memory; after a loss the job continues from this copy.

        Every rank must call it after the same step. Inside `gradring.elastic.run` it is also a
        collective of one byte, and processes join and leave here. Elsewhere it involves no other
        rank.

        Raises:
            TypeError: A value has become one that cannot be kept.
            ValueError: An asynchronous collective under way writes to an array.
            gradring.errors.SaveError: As many writes in a row have failed as `checkpoint_to`
                allows. It is raised on all ranks inside `gradring.elastic.run`, and elsewhere on
                the rank that writes.
        """
        self._commit = Commit.of(self._commit.number + 1, self._values())
        if self._commit.number % self._every_commits == 0:
            self._write()
        if self._after_commit is not None:
            self._after_commit(True)
        elif self._has_given_up:
            self._raise_failures()

    def restore(self) -> None:
        """Resets all values to the last commit."""
        self._assign(self._commit.values())

    def sync(self, communicator: Communicator) -> None:
        """Gives every rank the values of the newest commit of any rank.

        Every rank must call it after its group has formed. A rank that has made no commit uses the
        newest one in the directory of `checkpoint_to`, if there is one.

        A commit travels in pieces of 32 MiB, each with a hash. If a rank is lost meanwhile, the
        next call in the next group transfers only the missing pieces, from any rank that has them.

        Args:
            communicator: The group.

        Raises:
            gradring.errors.ConfigError: The newest commit has other values, so it is from another
                program.
            gradring.errors.MismatchError: Ranks have made arrays of different dtypes or shapes for
                this State. Or an array of the newest commit has another dtype, or differs in more
                than the length of its first axis.
            gradring.errors.RestoreError: A directory of checkpoints cannot be read.
            gradring.errors.ProtocolError: A piece changed on its way.
            gradring.errors.GradringError: A rank was lost during the call.
        """
        require_equal(communicator, self._must_match())
        self._sync(communicator, counts=True)

    def _must_match(self) -> dict[str, str]:
        """Returns the dtypes and shapes that all ranks must have in common, by name."""
        # Names of a model's arrays have dtype and shape after a colon, which the value repeats.
        return {f"State.{name.partition(':')[0]}": str(kind) for name, kind in self._arrays.items()}

    def _sync(self, communicator: Communicator, counts: bool) -> None:
        """Does the work of `sync`; without ``counts``, this process's commits are ignored."""
        unread = None
        if self._checkpoints is not None:
            self._writes = communicator.rank == 0
            if self._commit.number == 0 and counts:
                try:
                    self._commit = self._checkpoints.newest() or self._commit
                except OSError as error:
                    unread = error
        number = self._commit.number if counts else -1
        number = number if unread is None else _UNREAD
        numbers = communicator.all_gather(np.array([number]), name="elastic/newest")
        if (numbers == _UNREAD).any():
            with agreed(communicator, "read", "its checkpoints", RestoreError):
                if unread is not None:
                    raise unread
        root = int(np.argmax(numbers))
        number = int(numbers[root])
        may_be_here = self._commit.number == number
        own = self._commit.identity() if may_be_here else np.zeros(HASH_BYTES, np.uint8)
        identity = communicator.broadcast(own.copy(), root, name="elastic/identity")
        transfer = self._transfer
        if (own == identity).all():
            transfer = _Transfer(identity, self._commit)
        elif transfer is None or (transfer.identity != identity).any():
            transfer = _Transfer(identity)
        self._transfer = transfer
        payload, hashes = transfer.run(communicator, root)
        newest, self._transfer = Commit(number, payload, hashes), None
        found = newest.values()
        theirs, ours = found.keys() - set(self._kept()), set(self._kept()) - found.keys()
        if theirs or ours:
            raise ConfigError(
                f"the newest commit, number {newest.number} of rank {root} on "
                f"{communicator.hosts[root]}, has {_listed(theirs)} that this State does not have, "
                f"and lacks {_listed(ours)}. Another program may have made it; make the same State "
                "on all ranks, and give each program its own directory of checkpoints"
            )
        for name, kind in self._arrays.items():
            is_array = isinstance(found[name], np.ndarray)
            if is_array and not kind.may_become(theirs_kind := _Kind.of(found[name])):
                raise MismatchError(
                    f"the newest commit, number {newest.number} of rank {root} on "
                    f"{communicator.hosts[root]}, has {name!r} as {theirs_kind}, and rank "
                    f"{communicator.rank} on {communicator.host} has made it as {kind}. Another "
                    "program may have made the commit; give each program its own directory of "
                    "checkpoints, or make the array as before",
                    rank=communicator.rank,
                    host=communicator.host,
                )
        self._assign(found)
        self._commit = newest

    def checkpoint_to(
        self,
        directory: str | os.PathLike[str],
        *,
        every_commits: int = 1,
        keep: int = 3,
        max_failures: int | None = 100,
    ) -> None:
        """Keeps commits in files from the next `sync` on, for the death of the whole job.

        Rank 0 writes the files in a thread of its own. A file is complete or not there, and has a
        hash. If writing takes longer than the time between two commits, some commits are skipped.

        On every rank without a commit, `sync` looks for the newest complete file in this directory,
        so a restarted job continues from it. One rank that finds the file is enough: no common file
        system is needed.

        A full or missing disk does not stop the job at first, because the commit in memory is still
        good. The failure is logged, and the next commit that is due is a new attempt.

        Args:
            directory: Created if it does not exist. Files that an earlier job left there are used.
            every_commits: Only commits whose number is a multiple of it are written.
            keep: Number of files to keep.
            max_failures: Failed writes in a row after which `commit` raises
                `gradring.errors.SaveError`; None for no limit.

        Raises:
            gradring.errors.ConfigError: ``every_commits``, ``keep`` or ``max_failures`` is not a
                whole number of at least 1.
            gradring.errors.SaveError: The directory cannot be created. The error is also an
                `OSError`.

        Examples:
            >>> state = gradring.elastic.State(step=0)
            >>> state.checkpoint_to("checkpoints")
            >>> state.sync(comm)
            >>> state.step = 7
            >>> state.commit()
            >>> state.flush()
            >>> again = gradring.elastic.State(step=0)  # as of a job that is started again
            >>> again.checkpoint_to("checkpoints")
            >>> again.sync(comm)
            >>> again.step
            7
        """
        every_commits = parse.integer(every_commits, "every_commits", minimum=1)
        if max_failures is not None:
            max_failures = parse.integer(max_failures, "max_failures", minimum=1)
        try:
            self._checkpoints = Checkpoints(directory, keep)
        except OSError as error:
            raise SaveError(
                f"the directory of checkpoints {directory} cannot be made on "
                f"{socket.gethostname()}: {error}; give one that this process can write to"
            ) from error
        self._every_commits, self._max_failures = every_commits, max_failures

    def flush(self) -> None:
        """Waits until the checkpoints begun so far are on the disk.

        Inside `gradring.elastic.run` every rank must call it after the same step.

        Raises:
            gradring.errors.SaveError: The newest commit could not be written. It is raised on all
                ranks inside `gradring.elastic.run`, and elsewhere on the rank that writes.
        """
        self._ask_files(Checkpoints.flush)

    def _write(self) -> None:
        """Starts writing the last commit, on the rank that writes."""
        if self._writes and self._checkpoints is not None:
            self._checkpoints.write(self._commit)

    @property
    def _has_given_up(self) -> bool:
        """True if too many writes in a row have failed."""
        files, most = self._checkpoints, self._max_failures
        return self._writes and files is not None and most is not None and files.failures >= most

    def _raise_failures(self) -> None:
        """Raises SaveError, on all ranks of the group, if too many writes have failed."""
        self._ask_files(lambda files: files.check() if self._has_given_up else None)

    def _ask_files(self, ask: Callable[[Checkpoints], None]) -> None:
        group, files = self._group, self._checkpoints
        with _alone() if group is None else agreed(group, "write", "its checkpoints"):
            if files is not None:
                ask(files)

    def _kept(self) -> Sequence[str]:
        """Returns the names of the values that a commit copies."""
        return self._names

    def _values(self) -> dict[str, Any]:
        """Returns the values that a commit copies, by name."""
        return {name: getattr(self, name) for name in self._names}

    def _assign(self, values: Mapping[str, Any]) -> None:
        """Sets all values to those of a commit."""
        for name in self._names:
            setattr(self, name, values[name])


@dataclass(frozen=True)
class _Kind:
    """Dtype and shape of an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> _Kind:
        """Returns the kind of an array."""
        return cls(array.dtype, array.shape)

    def may_become(self, other: _Kind) -> bool:
        """Returns whether only the number of rows differs, which a program may change."""
        same = self.dtype == other.dtype and len(self.shape) == len(other.shape)
        return same and self.shape[1:] == other.shape[1:]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class _Transfer:
    """A commit on its way to this rank, with the pieces received so far."""

    def __init__(self, identity: NDArray[np.uint8], commit: Commit | None = None) -> None:
        """Begins with no piece, or with all pieces of ``commit``."""
        nothing = np.empty(0, np.uint8)
        self.identity = identity
        self._payload = nothing if commit is None else commit.payload
        self._hashes = nothing if commit is None else commit.hashes
        self._received = self._payload.size

    def run(
        self, communicator: Communicator, root: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Receives the missing pieces; the root has all of them.

        Returns:
            The payload, and the hashes of its pieces.

        Raises:
            gradring.errors.ProtocolError: A piece changed on its way.
        """
        size = np.array([self._payload.size])
        total = int(communicator.broadcast(size, root, name="elastic/size")[0])
        if self._received == 0:
            self._payload = np.empty(total, np.uint8)
        received = np.array([self._received])
        start = int(communicator.all_reduce(received, "min", name="elastic/received")[0])
        if start < total:
            self._receive_hashes(communicator, root)
            for piece in range(start // commits.PIECE_BYTES, len(self._hashes)):
                self._receive(piece, communicator, root)
        return self._payload, self._hashes

    def _receive_hashes(self, communicator: Communicator, root: int) -> None:
        pieces = -(-self._payload.size // commits.PIECE_BYTES)
        is_whole = self._received == self._payload.size
        hashes = self._hashes if is_whole else np.empty((pieces, HASH_BYTES), np.uint8)
        hashes = communicator.broadcast(hashes.copy(), root, name="elastic/hashes")
        if (hash_of(hashes) != self.identity).any():
            raise _changed(communicator, root, "hashes")
        self._hashes = hashes

    def _receive(self, piece: int, communicator: Communicator, root: int) -> None:
        start = piece * commits.PIECE_BYTES
        end = min(start + commits.PIECE_BYTES, self._payload.size)
        contents = self._payload[start:end]
        if self._received >= end:  # this rank takes part for the others
            communicator.broadcast(contents.copy(), root, name="elastic/piece")
            return
        communicator.broadcast(contents, root, name="elastic/piece")
        if (hash_of(contents) != self._hashes[piece]).any():
            raise _changed(communicator, root, f"bytes {start} to {end}")
        self._received = end


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Turns an OSError of this process into a SaveError, as `agreed` does in a group."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"this process on {socket.gethostname()} could not write its checkpoints: {error}"
        ) from error


def _changed(communicator: Communicator, root: int, what: str) -> ProtocolError:
    text = f"{what} of a commit changed on their way from rank {root}"
    communicator.abort(text)
    host = communicator.hosts[root]
    return ProtocolError(f"{text} on {host}", advice="use checksum=True", rank=root, host=host)


def _listed(names: Iterable[str]) -> str:
    first, *others = [*sorted(names), "nothing"]
    more = len(others) - 1
    return first if more < 1 else f"{first} and {more} more"
