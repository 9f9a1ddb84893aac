"""Encoding of Python objects as bytes: JSON, or pickle if all ranks ask for it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from typing import Any

_SCALARS = (str, int, float, bool, type(None))


class _Bytes(bytearray):
    """A writable file of bytes, since `pickle.dumps` returns read-only bytes."""

    write = bytearray.extend


def encode(value: object, pickled: bool, of: str) -> str | bytearray:
    """Encodes an object as JSON in ASCII, or as a pickle.

    Args:
        value: The object; JSON must reproduce it exactly, unless ``pickled``.
        pickled: True for a pickle.
        of: The collective, for messages.

    Raises:
        TypeError: The object, or a part of it, cannot be pickled; or JSON has no form for it or
            would silently change it.
    """
    if pickled:
        return _pickled(value, of)
    try:
        text = json.dumps(value, separators=(",", ":"))
        problem = _change(value, "the object")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{of}: {error}; {_WAY_OUT}") from error
    if problem is not None:
        raise TypeError(f"{of}: {problem}; {_WAY_OUT}")
    return text


def decode(received: bytearray, pickled: bool, rank: int, of: str) -> Any:
    """Decodes an object; a pickle can run any code of its sender.

    Args:
        received: Result of `encode`; emptied, to free memory before the next one is decoded.
        pickled: As in `encode`.
        rank: The sender, for messages.
        of: As in `encode`.

    Raises:
        TypeError: The bytes cannot be unpickled here.
    """
    if not pickled:
        text = received.decode("ascii")
        received.clear()
        return json.loads(text)
    try:
        found = pickle.loads(received)
        received.clear()
        return found
    except Exception as error:
        raise TypeError(
            f"{of}: the object of rank {rank} cannot be unpickled here: {type(error).__name__}: "
            f"{error}; its class must be one that every rank can import"
        ) from error


_WAY_OUT = "send lists, dicts with text for keys, text, numbers, bools and None, or pickle=True"


def _pickled(value: object, of: str) -> bytearray:
    pickled = _Bytes()
    try:
        pickle.dump(value, pickled, protocol=pickle.HIGHEST_PROTOCOL)
        return pickled
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        kind = type(value).__name__
        raise TypeError(
            f"{of}: this {kind} cannot be pickled: {error}; send what pickle.dumps takes"
        ) from error


def _change(value: object, place: str) -> str | None:
    """Describes the first part that JSON would change in type or value; None if there is none."""
    if type(value) is list:
        return _first(_change(item, f"{place}[{index}]") for index, item in enumerate(value))
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return f"the key {key!r} of {place} would become text"
        return _first(_change(item, f"{place}[{key!r}]") for key, item in value.items())
    if type(value) not in _SCALARS:
        return f"{place} is a {type(value).__name__}, which would change on its way"
    return None


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
