"""Python objects as bytes that ranks send one another: JSON, or pickles where all ask for them."""

from __future__ import annotations

import json
import pickle
from typing import Any

_SCALARS = (str, int, float, bool, type(None))


def encode(value: object, pickled: bool, of: str) -> bytes:
    """The bytes of an object.

    Args:
        value: The object; unless ``pickled``, one that JSON gives back as it is.
        pickled: Whether to pickle it.
        of: The collective, for messages.

    Raises:
        TypeError: It is, or holds, something that JSON cannot say or would silently change.
    """
    if pickled:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        text = json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{of}: {error}; {_WAY_OUT}") from error
    _check_unchanged(value, "the object", of)
    return text.encode()


def decode(received: bytes, pickled: bool) -> Any:
    """The object of these bytes; where they are a pickle, whatever their sender likes is run."""
    return pickle.loads(received) if pickled else json.loads(received)


_WAY_OUT = "send lists, dicts with text for keys, text, numbers, bools and None, or pickle=True"


def _check_unchanged(value: object, place: str, of: str) -> None:
    """Raises TypeError if what JSON gives back would not be equal in type and value."""
    if type(value) is list:
        for index, item in enumerate(value):
            _check_unchanged(item, f"{place}[{index}]", of)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{of}: the key {key!r} of {place} would become text; {_WAY_OUT}")
            _check_unchanged(item, f"{place}[{key!r}]", of)
    elif type(value) not in _SCALARS:
        kind = type(value).__name__
        raise TypeError(f"{of}: {place} is a {kind}, which would change on its way; {_WAY_OUT}")
