"""Commit: a copy of a program's values at one moment, as bytes for the network and for files."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring import _native
from gradring.group import arrays

HASH_BYTES = 16
#: Size of a piece, in bytes. Each piece travels in one collective and has a hash, so that an
#: interrupted transfer continues after its last complete piece.
PIECE_BYTES = 32 << 20
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Commit:
    """A copy of all values at one moment.

    Attributes:
        number: Number of earlier commits of the job.
        payload: One-dimensional uint8 array: the length of the JSON text in 8 bytes, the JSON text,
            and the bytes of the arrays. The text (UTF-8) has the dtypes and shapes of the arrays,
            and all other values.
        known_hashes: Hashes of the pieces, if they are known already.
    """

    number: int
    payload: NDArray[np.uint8]
    known_hashes: NDArray[np.uint8] | None = None

    @staticmethod
    def of(number: int, values: Mapping[str, Any]) -> Commit:
        """Copies values.

        Raises:
            TypeError: A value is neither an array of fixed width nor a value that JSON restores
                unchanged.
            ValueError: A running asynchronous collective writes to an array.
        """
        described: dict[str, Any] = {}
        parts = []
        for name, value in values.items():
            if isinstance(value, np.ndarray | np.generic):
                _check_plain(name, value)
                array = np.asarray(value)
                _native.check_readable(array)
                shape = None if isinstance(value, np.generic) else array.shape
                described[name] = {"dtype": _name_of(name, array.dtype), "shape": shape}
                parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            elif _is_plain(value):
                described[name] = {"value": value}
            else:
                raise TypeError(
                    f"a State cannot keep {name!r}, of type {type(value).__name__}; give it numpy "
                    "arrays or values of JSON\nValues of JSON are numbers, texts, booleans, None, "
                    "lists, and dictionaries with texts as keys. Give each array inside of these "
                    "its own name, convert tuples to lists and tensors to arrays, and any other "
                    "object by np.frombuffer(pickle.dumps(value), np.uint8)."
                )
        text = np.frombuffer(json.dumps(described).encode(), np.uint8)
        length = np.array([text.size], "<i8").view(np.uint8)
        return Commit(number, np.concatenate([length, text, *parts]))

    def values(self) -> dict[str, Any]:
        """Returns copies of the values, by name; raises any exception for damaged contents."""
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
        if start != self.payload.size:
            raise ValueError(f"{self.payload.size} bytes are not the {start} that it describes")
        return found

    @functools.cached_property
    def hashes(self) -> NDArray[np.uint8]:
        """Hashes of the pieces, one row for each."""
        if self.known_hashes is not None:
            return self.known_hashes
        starts = range(0, self.payload.size, PIECE_BYTES)
        return np.array([hash_of(self.payload[start : start + PIECE_BYTES]) for start in starts])

    def identity(self) -> NDArray[np.uint8]:
        """Returns a hash of the whole payload."""
        return hash_of(self.hashes)


def hash_of(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a hash of 16 bytes; different contents have equal hashes once in 2**128."""
    digest = hashlib.blake2b(data.reshape(-1).data, digest_size=HASH_BYTES).digest()
    hashed: NDArray[np.uint8] = np.frombuffer(digest, np.uint8).copy()
    return hashed


def _name_of(name: str, dtype: np.dtype[Any]) -> str:
    """Returns the name by which numpy finds the dtype again.

    Raises:
        TypeError: The dtype contains Python objects or fields, or has no width.
    """
    if dtype.hasobject or dtype.names is not None or dtype.itemsize == 0:
        raise TypeError(f"a State cannot keep the array {name!r} of dtype {dtype}")
    # Some dtypes, such as bfloat16, share their `str` with another one, so they need their name.
    return str(dtype.str if np.dtype(dtype.str) == dtype else dtype.name)


def _check_plain(name: str, array: Any) -> None:
    """Raises TypeError if a mask or a unit would be lost."""
    try:
        arrays.check_plain(array)
    except TypeError as error:
        raise TypeError(f"a State cannot keep {name!r}: {error}") from error


def _is_plain(value: Any) -> bool:
    """Returns whether JSON restores the value exactly: no tuples, no keys but strings."""
    # No subclasses: JSON restores a plain dict, without a default or other additions.
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)
