"""The judgement: what ranks find against what one process finds."""

from __future__ import annotations

from typing import Any

import numpy as np

from program_fuzz.features import Program
from program_fuzz.groups import Outcome

#: Relative to the largest number of an array, and where that is small, to `SMALL`.
TOLERANCES = {"float64": 1e-8, "float32": 2e-5, "mixed_bfloat16": 4e-2, "mixed_float16": 1e-2}
#: Keras computes schedules of the learning rate in float32, with a last bit that varies.
WITH_SCHEDULE = 1e-6
SMALL = {"float64": 1e-4, "float32": 1e-1, "mixed_bfloat16": 1.0, "mixed_float16": 1.0}


def judged(program: Program, alone: Outcome, ranks: Outcome) -> str:
    """How ranks differ from one process, or nothing."""
    if ranks.error:
        return f"fails: {ranks.error}"
    (expected,) = alone.results
    tolerance = WITH_SCHEDULE if program["schedule"] is not None else 0.0
    for rank, found in enumerate(ranks.results):
        for part in sorted(set(expected) | set(found), key=_order):
            if program["door"] in ("reducer", "horovod") and part == "history":
                continue
            text = differs(expected.get(part), found.get(part), program["precision"], tolerance)
            if text:
                return f"{part}: {text}, rank {rank}"
    return ""


def _order(part: str) -> tuple[int, str]:
    order = ("weights", "optimizer", "history")
    return (order.index(part) if part in order else len(order), part)


def differs(expected: Any, found: Any, precision: str, tolerance: float = 0) -> str:
    """The first difference of two trees of numbers above the tolerance of the precision."""
    tolerance = max(tolerance, TOLERANCES[precision])
    one, other = leaves(expected), leaves(found)
    if one.keys() != other.keys():
        return f"has {sorted(other.keys() ^ one.keys())[:3]} in one of them only"
    for name, value in one.items():
        if value.shape != other[name].shape:
            return f"{name} has the shape {other[name].shape} in place of {value.shape}"
        if not value.size:
            continue
        is_equal = np.isclose(value, other[name], rtol=0, atol=0, equal_nan=True)
        size = max(float(np.max(np.abs(np.nan_to_num(value)))), SMALL[precision])
        distance = np.where(is_equal, 0, np.abs(other[name] - value)) / size
        worst = float(np.max(np.where(np.isnan(distance), np.inf, distance)))
        if worst > tolerance:
            at = int(np.argmax(distance))
            numbers = f"{value.ravel()[at]:.9g} became {other[name].ravel()[at]:.9g}"
            return f"{name} differs by {worst:.1e} ({numbers})"
    return ""


def leaves(value: Any, name: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of a tree, by their places."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and not _is_array(value):
        parts = ((str(index), each) for index, each in enumerate(value))  # type: ignore[assignment]
    else:
        return {name: np.asarray([] if value is None else value, np.float64)}
    found: dict[str, np.ndarray[Any, Any]] = {}
    for key, each in parts:
        found |= leaves(each, f"{name}.{key}" if name else str(key))
    return found


def _is_array(value: list[Any]) -> bool:
    try:
        return np.asarray(value).dtype.kind == "f" and len(value) > 0
    except ValueError:
        return False
