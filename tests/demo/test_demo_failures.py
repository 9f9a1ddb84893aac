"""Messages to a user of the demo when it cannot work."""

import importlib.util
import io
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from gradring.tools import cli
from gradring.tools.demo import story
from gradring.tools.demo.results import GRADRING, Variant
from gradring.tools.demo.story import LiveLine, TrainingError


def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def found(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "sklearn" else None

    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert cli.main(["demo", "--report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "TensorFlow and matplotlib are missing" in said
    assert 'pip install "tensorflow' in said
    assert "scikit-learn" not in said


def test_beside_a_tensorflow_only_the_other_packages_are_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def found(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "tensorflow" else None

    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert cli.main(["demo", "--report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(
        'with: pip install "scikit-learn>=1.4" "matplotlib>=3.8"\n'
    )


def test_of_a_failed_training_the_last_lines_are_shown_and_all_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = [f"line {number}\n" for number in range(100)]

    def fail(*arguments: Any) -> int:
        for line in printed:
            arguments[-1](line)
        return 7

    monkeypatch.setattr(story, "run_script", fail)
    live = LiveLine("gradring", io.StringIO())
    with pytest.raises(TrainingError, match=r"\(exit code 7\)") as caught:
        story.train(GRADRING, tmp_path, tmp_path / "log", 2, live)
    shown = "".join(printed[-story.LAST_LINES :])
    assert str(caught.value).endswith(f"The end of it:\n{shown}")
    assert (tmp_path / "log").read_text() == "".join(printed)


@pytest.mark.slow
def test_a_training_that_fails_shows_its_last_lines_and_keeps_all(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    log = tmp_path / "log"
    live = LiveLine("nonsense", io.StringIO())
    with pytest.raises(TrainingError, match="invalid choice: 'nonsense'") as caught:
        story.train(Variant("nonsense", "nonsense", 1), tmp_path, log, 2, live)
    assert str(log) in str(caught.value)
    assert "invalid choice" in log.read_text()


def test_a_training_that_never_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(story, "DEADLINE_S", 0.5)
    live = LiveLine("gradring", io.StringIO())
    with pytest.raises(TrainingError, match=r"no end within 0\.5 s"):
        story.train(GRADRING, tmp_path, tmp_path / "log", 2, live)


def test_only_the_comparison_may_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(story, "require_packages", lambda: None)

    def fail(variant: Variant, *_: object) -> None:
        raise TrainingError(f"{variant.title} failed")

    monkeypatch.setattr(story, "train", fail)
    with pytest.raises(TrainingError, match="gradring failed"):
        story.demo(tmp_path, stream=io.StringIO())


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
