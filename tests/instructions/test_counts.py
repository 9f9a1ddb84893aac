"""Counts read from a dump of callgrind, and the differences that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from instructions.__main__ import SLACK, TOLERANCE, Counts, counts_in, differences

DUMP = """\
ob=(1) /lib/libc.so.6
fn=(1) (below main)
7 1000
ob=(2) /here/counted
fn=(2) path
10 3
+1 2
cob=(1)
cfn=(3) malloc
calls=2 0
* 80
cob=(1)
cfn=(7) free
calls=2 0
* 30
cob=(1)
cfn=(8) memcpy
calls=1 0
* 40
cfn=(4) helper
calls=1 5
* 9
cob=(3) /lib/libpython3.so
cfn=(5) PyNone
calls=1 9
* 500
fn=(6) main
cob=(1)
cfn=(1)
calls=0 0
5 2000
"""


def test_the_object_and_what_the_c_library_does_for_it_are_counted(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.write_text(DUMP)
    assert counts_in(dump, Path("counted")) == Counts(3 + 2 + 40, 2)


@pytest.mark.parametrize(
    ("counts", "fails"),
    [
        (Counts(10_000, 4), False),
        (Counts(int(10_000 * (1 + TOLERANCE)), 4), False),
        (Counts(int(10_000 * (1 + TOLERANCE)) + 1, 4), True),
        (Counts(int(10_000 * (1 - TOLERANCE)) - 1, 4), True),
        (Counts(10_000, 5), True),
    ],
)
def test_more_or_fewer_instructions_and_any_allocation_fail(counts: Counts, fails: bool) -> None:
    assert differences({"path": counts}, {"path": Counts(10_000, 4)}) == ["path"] * fails


def test_a_short_path_may_move_by_some_instructions_and_a_missing_one_fails() -> None:
    recorded = {"short": Counts(100, 0), "gone": Counts(100, 0)}
    assert differences({"short": Counts(100 + SLACK, 0)}, recorded) == ["gone"]
    assert differences({"new": Counts(100, 0)}, {}) == ["new"]
