"""Messages to a user of the demo when it cannot work."""

import errno
import importlib.util
import io
import signal
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from made_up import Printed, rank_result, results

from gradring.tools import cli
from gradring.tools.demo import launched, rules, story, trouble
from gradring.tools.demo.report import GRADRING, MIRRORED, SINGLE, RankResult
from gradring.tools.demo.story import TrainingError


def test_missing_packages_are_named_with_the_command_that_installs_them_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:

    def said_beside(there: str) -> str:
        monkeypatch.setattr(importlib.util, "find_spec", {there: ModuleSpec(there, None)}.get)
        assert cli.main(["demo", "--report", str(tmp_path)]) == 2
        return capsys.readouterr().err

    said = said_beside("sklearn")
    assert "TensorFlow and matplotlib are missing" in said
    assert 'pip install "tensorflow' in said
    assert "scikit-learn" not in said
    assert said_beside("tensorflow").endswith(
        'with: pip install "scikit-learn>=1.4" "matplotlib>=3.8"\n'
    )


def test_of_a_failed_training_the_last_lines_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = [f"line {number}\n" for number in range(100)]
    Printed("".join(printed), 7).instead_of(story, monkeypatch)
    with pytest.raises(TrainingError, match=r"\(exit code 7\)") as caught:
        story.train(GRADRING, 2, tmp_path, io.StringIO())
    shown = "".join(printed[-story.LAST_LINES :])
    assert str(caught.value).endswith(f"The end of it:\n{shown}")
    assert f"{tmp_path / GRADRING} holds all" in str(caught.value)


@pytest.mark.slow
def test_a_training_that_fails_shows_its_last_lines_and_keeps_all(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    logs = tmp_path / "nonsense"
    with pytest.raises(TrainingError, match="invalid choice: 'nonsense'") as caught:
        story.train("nonsense", 1, tmp_path, io.StringIO())
    assert str(logs) in str(caught.value)
    assert "invalid choice" in (logs / "rank-0.log").read_text()


def test_a_training_that_never_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launched, "DEADLINE_S", 0.5)
    with pytest.raises(TrainingError, match=r"no end within 0\.5 s"):
        story.train(GRADRING, 2, tmp_path, io.StringIO())


def test_only_the_comparison_may_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(story, "require_packages", lambda: None)

    def fail(training: str, *_: object) -> None:
        raise TrainingError(f"{training} failed")

    monkeypatch.setattr(story, "train", fail)
    with pytest.raises(TrainingError, match="gradring failed"):
        story.demo(tmp_path, stream=io.StringIO())


def test_without_tensorflows_own_strategy_the_demo_says_why_and_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(story, "require_packages", lambda: None)
    whole = results()

    def train(training: str, *_: object) -> Sequence[RankResult]:
        if training == MIRRORED:
            raise TrainingError("the training failed (exit code 1). The end of it:\nTraceback")
        return whole.gradring if training == GRADRING else [whole.single]

    monkeypatch.setattr(story, "train", train)
    output = io.StringIO()
    assert story.demo(tmp_path / "report", stream=output) == 0
    said = " ".join(output.getvalue().split())
    why = "MultiWorkerMirroredStrategy: the training failed (exit code 1). 2 workers with"
    assert f"There is no comparison with {why}" in said and "Traceback" not in said
    assert (tmp_path / "report" / "comparison.png").exists()


def test_a_demo_whose_ranks_have_unlike_weights_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(story, "require_packages", lambda: None)
    apart = (rank_result(0), rank_result(1, weights_hash="6f" * 8))
    whole = results(gradring=apart)
    trained = {GRADRING: apart, MIRRORED: whole.mirrored, SINGLE: [whole.single]}
    monkeypatch.setattr(story, "train", lambda training, *_: trained[training])
    output = io.StringIO()
    assert story.demo(tmp_path, stream=output) == 1
    assert "\nFAILED  The ranks hold different weights: SHA-256 rank 0 5e5e" in output.getvalue()
    assert output.getvalue().count("\npassed  ") == 2


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "demo()"),
        (["--slow-rank", "1"], "show_slow_rank(1)"),
        (["--kill", "3"], "show_killed_rank(3)"),
        (["--update", "diloco"], "show_rule('diloco')"),
    ],
)
def test_an_option_shows_something_instead_of_the_comparison(
    options: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = []

    def instead(name: str) -> Callable[..., int]:
        def show(*arguments: object) -> int:
            *given, report = arguments
            assert report == tmp_path
            called.append(f"{name}({', '.join(map(repr, given))})")
            return 7

        return show

    places = {trouble: ["show_slow_rank", "show_killed_rank"], story: ["demo"]}
    for module, names in {**places, rules: ["show_rule"]}.items():
        for name in names:
            monkeypatch.setattr(module, name, instead(name))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main(["demo", "--report", str(tmp_path), *options]) == 7
        # It ends the trainings, too.
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [shown]


def test_a_report_for_which_there_is_no_room_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Path) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(story, "demo", full)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main(["demo", "--report", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "gradring: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("trouble", [[], ["--slow-rank", "1"], ["--kill", "1"]])
def test_a_report_that_cannot_be_a_directory_is_noticed_before_any_training(
    trouble: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report"
    file.touch()
    for report, problem in (
        (file, "this is a file; name a directory"),
        (file / "below", "this directory cannot be made (Not a directory); name another"),
    ):
        assert cli.main(["demo", "--report", str(report), *trouble]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", f"gradring demo: --report {report}: {problem}\n")
