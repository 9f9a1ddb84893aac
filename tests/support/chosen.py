"""The cases that a run has, slow ones only if asked, so that a fixture computes no others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import pytest
from _pytest.mark import ParameterSet


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


def marked(cases: Iterable[Any], quick: Collection[Any]) -> list[ParameterSet]:
    """Cases of one parameter; those that are not quick ones are for `make test-all` only."""
    return marked_rows([(case,) for case in cases], [(case,) for case in quick])


def marked_rows(rows: Iterable[tuple[Any, ...]], quick: Collection[Any]) -> list[ParameterSet]:
    """The same for cases of several parameters."""
    slow, rows = (pytest.mark.slow,), [*rows]
    unknown = [row for row in quick if row not in rows]
    assert not unknown, f"no cases: {unknown}"
    return [pytest.param(*row, marks=() if row in quick else slow) for row in rows]


class _NONE:
    """Of a test without parameters."""

    params: ClassVar[dict[str, Any]] = {}
