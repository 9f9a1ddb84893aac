"""The demo with another update rule."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gradring.errors import ConfigError
from gradring.tools.demo import rules


def test_a_rule_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--update x is not one of all-reduce, .*, diloco"):
        rules.show_rule("x", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", rules.RULES)
def test_each_rule_is_shown_with_what_it_reaches_and_sends(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    output = io.StringIO()
    assert rules.show_rule(name, tmp_path, stream=output) == 0, output.getvalue()
    assert f"update=updates.{rules.RULES[name]}" in output.getvalue()
    assert "MB sent by rank 0" in output.getvalue()
