"""The demo with another update rule."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_up import Printed

from gradring.tools.cli import main
from gradring.tools.demo import launched, rules


def test_a_rule_that_there_is_not_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--update", "dilocco"])
    said = capsys.readouterr().err
    assert "there is no 'dilocco'; did you mean diloco? (choose from all-reduce, " in said


@pytest.mark.parametrize(
    ("accuracy", "training_code", "exit_code", "said"),
    [
        ("0.960", 0, 0, "`gradring demo --update all-reduce` does the same with the default."),
        ("0.959", 0, 1, "The training did not end, or not with an accuracy of 0.96."),
        ("0.989", 3, 1, "The training did not end, or not with an accuracy of 0.96."),
        (None, 0, 1, "The training did not end, or not with an accuracy of 0.96."),
    ],
)
@pytest.mark.parametrize(("name", "servers"), [("top-k", []), ("asynchronous", ["--ps", "1"])])
def test_a_rule_is_shown_by_a_training_that_has_to_reach_an_accuracy(
    name: str,
    servers: list[str],
    accuracy: str | None,
    training_code: int,
    exit_code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = f"[0] finished: loss 0.1, test accuracy {accuracy}, 1.2 MB sent by rank 0\n"
    text = "[0] epoch 1/20 step 20 loss 0.5 test accuracy 0.970\n" + last * (accuracy is not None)
    training = Printed(text, training_code).instead_of(rules, monkeypatch)
    output = io.StringIO()
    assert rules.show_rule(name, tmp_path, stream=output) == exit_code
    assert output.getvalue().endswith(f"update=updates.{rules.RULES[name]})\n\n{text}\n{said}\n")
    options = ["--update", name, "--epochs", str(launched.EPOCHS)]
    assert training.started == [(3, tmp_path, options, servers)]


@pytest.mark.slow
@pytest.mark.parametrize("name", rules.RULES)
def test_each_rule_is_shown_with_what_it_reaches_and_sends(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    output = io.StringIO()
    assert rules.show_rule(name, tmp_path, stream=output) == 0, output.getvalue()
    assert f"update=updates.{rules.RULES[name]}" in output.getvalue()
    assert "MB sent by rank 0" in output.getvalue()
