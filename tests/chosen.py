"""Which cases of its tests a run has, so that a fixture for many of them computes no others."""

from __future__ import annotations

from typing import Any

import pytest


def chosen(request: pytest.FixtureRequest, argument: str, test: str | None = None) -> list[Any]:
    """The values of a parameter in this run's tests of the fixture's module, each once.

    Without ``slow`` or with ``-k`` a run has few of them. With ``test`` only those of one test
    function count.
    """
    found = [
        item.callspec.params[argument]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and test in (None, item.originalname)
        and argument in getattr(item, "callspec", _NONE).params
    ]
    return [value for index, value in enumerate(found) if value not in found[:index]]


class _NONE:
    """Of a test without parameters."""

    params: dict[str, Any] = {}
