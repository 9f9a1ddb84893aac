"""What survives the loss of a rank: a program's values, as of its last commit."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradring.communicator import Communicator
from gradring.errors import ProtocolError

#: What travels at once, in bytes. A transfer that breaks goes on after its last whole piece.
PIECE_BYTES = 32 << 20
_HASH_BYTES = 16
_LENGTH_BYTES = 8


class Regroup(BaseException):
    """All ranks leave the function now, because others wait to join, or one of them goes.

    No `Exception`, so that no handler of the program's keeps a rank in it.
    """


class Group(Protocol):
    """The group whose ranks commit together."""

    def agree(self, number: int) -> bool:
        """Waits until all ranks make this commit.

        Returns:
            Whether they are to leave the function after it.

        Raises:
            gradring.errors.GradringError: A rank was lost.
        """


class State:
    """Values that the ranks of an elastic job have in common, and their last commit.

    ```python
    state = gradring.elastic.State(weights=np.zeros(1000), step=0)
    state.step += 1
    state.commit()
    ```

    A value is an attribute: a numpy array, or what JSON can say (numbers, texts, truths, None, and
    lists and dictionaries of them). Other attributes are refused, because they would be lost.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The values have the names that the program gives them."""

    def __init__(self, **values: Any) -> None:
        """Takes the values, as the first commit.

        Args:
            values: By name.

        Raises:
            TypeError: A value is neither an array of fixed width nor what JSON can say.
        """
        self._names = tuple(values)
        self._resets: list[Callable[[], None]] = []
        self._group: Group | None = None
        self._transfer: _Transfer | None = None
        for name, value in values.items():
            setattr(self, name, value)
        self._commit = Commit.of(0, self._values())

    def __setattr__(self, name: str, value: Any) -> None:
        """Changes a value.

        Raises:
            AttributeError: It is no value of this state.
        """
        if not name.startswith("_") and name not in self._names:
            raise AttributeError(
                f"this State keeps {', '.join(self._names) or 'nothing'}, and would lose "
                f"{name!r} with a rank; give it to State(...) when you make it"
            )
        super().__setattr__(name, value)

    def commit(self) -> None:
        """Copies all values in memory; a loss takes the job back to here, and no further.

        In a function of `gradring.elastic.run` every rank must call it, after the same step. If
        others wait to join, all ranks leave the function here, and it is called anew.

        Raises:
            TypeError: A value has become something that cannot be kept.
            gradring.errors.GradringError: A rank was lost; the commit before counts.
        """
        made = Commit.of(self._commit.number + 1, self._values())
        regroup = self._group is not None and self._group.agree(made.number)
        self._commit = made
        if regroup:
            raise Regroup

    def restore(self) -> None:
        """Gives all values what they had at the last commit."""
        self._assign(self._commit.values())

    def sync(self, communicator: Communicator) -> None:
        """Gives every rank the values of the newest commit that one of them has.

        Every rank must call it. What travels does so in pieces of 32 MiB, each with a hash. If a
        rank is lost meanwhile, the next call, in the next group, goes on with the pieces that are
        missing, from any rank that has them.

        Args:
            communicator: The group.

        Raises:
            gradring.errors.ProtocolError: A piece changed on its way.
            gradring.errors.GradringError: A rank was lost meanwhile.
        """
        numbers = communicator.all_gather(np.array([self._commit.number]), name="elastic/newest")
        root = int(np.argmax(numbers))
        own = self._commit.identity()
        identity = communicator.broadcast(own.copy(), root, name="elastic/identity")
        transfer = self._transfer
        if (own == identity).all():
            transfer = _Transfer.of(self._commit)
        elif transfer is None or (transfer.identity != identity).any():
            transfer = _Transfer(identity)
        self._transfer = transfer
        payload = transfer.run(communicator, root)
        self._commit, self._transfer = Commit(int(numbers[root]), payload), None
        self.restore()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Has functions called when the members of the group have changed, before it goes on.

        Args:
            callbacks: They take nothing, and are called in this order; such as one that scales the
                learning rate with the number of ranks.
        """
        self._resets.extend(callbacks)

    def on_reset(self) -> None:
        """The members have changed: calls what was registered."""
        for callback in self._resets:
            callback()

    def _values(self) -> dict[str, Any]:
        """What a commit copies, by name."""
        return {name: getattr(self, name) for name in self._names}

    def _assign(self, values: Mapping[str, Any]) -> None:
        """Takes what a commit has copied."""
        for name in self._names:
            setattr(self, name, values[name])


@dataclass(frozen=True)
class Commit:
    """A copy of all values at one moment.

    Attributes:
        number: How many commits the job had made before.
        payload: uint8, one dimension: the length of what follows in 8 bytes; JSON in UTF-8, the
            dtypes and shapes of the arrays and all other values; the bytes of the arrays.
    """

    number: int
    payload: NDArray[np.uint8]

    @staticmethod
    def of(number: int, values: Mapping[str, Any]) -> Commit:
        """Copies values.

        Raises:
            TypeError: A value is neither an array of fixed width nor what JSON can say.
        """
        described: dict[str, Any] = {}
        parts = []
        for name, value in values.items():
            if isinstance(value, np.ndarray | np.generic):
                array = np.asarray(value)
                shape = None if isinstance(value, np.generic) else array.shape
                described[name] = {"dtype": _name_of(name, array.dtype), "shape": shape}
                parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            else:
                described[name] = {"value": value}
        try:
            text = np.frombuffer(json.dumps(described).encode(), np.uint8)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"a State keeps numpy arrays and what JSON can say; of {', '.join(values)}, one "
                f"is something else: {error}"
            ) from error
        length = np.array([text.size], "<i8").view(np.uint8)
        return Commit(number, np.concatenate([length, text, *parts]))

    def values(self) -> dict[str, Any]:
        """Copies of the values, by name."""
        start = _LENGTH_BYTES + int(self.payload[:_LENGTH_BYTES].view("<i8")[0])
        found: dict[str, Any] = {}
        for name, described in json.loads(self.payload[_LENGTH_BYTES:start].tobytes()).items():
            if "value" in described:
                found[name] = described["value"]
                continue
            dtype, shape = np.dtype(described["dtype"]), described["shape"]
            end = start + dtype.itemsize * math.prod(shape or ())
            elements = self.payload[start:end].copy().view(dtype)
            found[name] = elements[0] if shape is None else elements.reshape(shape)
            start = end
        return found

    def identity(self) -> NDArray[np.uint8]:
        """A hash of everything."""
        return _hash(self.payload)


class _Transfer:
    """A commit on its way to this rank, and what of it is here."""

    def __init__(self, identity: NDArray[np.uint8]) -> None:
        self.identity = identity
        self._payload = np.empty(0, np.uint8)
        self._received = 0

    @staticmethod
    def of(commit: Commit) -> _Transfer:
        """One of which everything is here."""
        transfer = _Transfer(commit.identity())
        transfer._payload, transfer._received = commit.payload, commit.payload.size
        return transfer

    def run(self, communicator: Communicator, root: int) -> NDArray[np.uint8]:
        """Receives what is missing here; the root has everything.

        Returns:
            The payload.

        Raises:
            gradring.errors.ProtocolError: A piece changed on its way.
        """
        size = np.array([self._payload.size])
        total = int(communicator.broadcast(size, root, name="elastic/size")[0])
        if self._received == 0:
            self._payload = np.empty(total, np.uint8)
        received = np.array([self._received])
        start = int(communicator.all_reduce(received, "min", name="elastic/received")[0])
        while start < total:
            end = min(start + PIECE_BYTES, total)
            piece = self._payload[start:end].copy()
            expected = communicator.broadcast(_hash(piece), root, name="elastic/hash")
            communicator.broadcast(piece, root, name="elastic/piece")
            if (_hash(piece) != expected).any():
                text = f"bytes {start} to {end} of a commit changed on their way from rank {root}"
                communicator.abort(text)
                host = communicator.hosts[root]
                raise ProtocolError(f"{text} on {host}; use checksum=True", rank=root, host=host)
            if self._received < end:
                self._payload[start:end] = piece
                self._received = end
            start = end
        return self._payload


def _hash(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    digest = hashlib.blake2b(data.data, digest_size=_HASH_BYTES).digest()
    hashed: NDArray[np.uint8] = np.frombuffer(digest, np.uint8).copy()
    return hashed


def _name_of(name: str, dtype: np.dtype[Any]) -> str:
    """By which numpy finds the dtype again.

    Raises:
        TypeError: It has Python objects or fields in it.
    """
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        raise TypeError(f"a State cannot keep the array {name!r} of dtype {dtype}")
    # Those of other packages, such as bfloat16, have names only.
    return str(dtype.name if dtype.kind == "V" else dtype.str)
