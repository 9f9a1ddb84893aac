"""Wrong settings, calls and situations: what a user sees is short, and ends with what to do."""

from pathlib import Path

import pytest
from situations import OF_TENSORFLOW, SITUATIONS, Situation, said_of_tensorflow, seen

#: As much can be read at a glance.
LAST_LINE_MAX = 420


@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
def test_the_last_line_says_what_is_wrong_and_what_to_do(
    situation: Situation, tmp_path: Path
) -> None:
    found = seen(situation, tmp_path)
    printed = "\n".join(found.lines)
    assert found.code == situation.code, printed
    for part in situation.says:
        assert part in found.last, printed
    assert len(found.lines) <= situation.lines, printed
    assert len(found.last) <= LAST_LINE_MAX, printed


def test_a_wrong_call_of_tensorflow_is_told_in_one_line_with_what_to_do(tmp_path: Path) -> None:
    said = said_of_tensorflow(tmp_path)
    assert set(said) == set(OF_TENSORFLOW)
    for call, parts in OF_TENSORFLOW.items():
        assert all(part in said[call] for part in parts), (call, said[call])
        assert "\n" not in said[call] and len(said[call]) <= LAST_LINE_MAX, said[call]


def test_there_are_at_least_forty_of_different_names() -> None:
    assert len({situation.name for situation in SITUATIONS}) == len(SITUATIONS) >= 40
