"""Programs as people write them for one machine, and what `gradring verify` says of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import completed
from support.installed import environment_with_start_hook

# Each is trained by three processes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
EQUAL = ("text_transformer", "wgan_gp")
#: Of each program, what the verdict says.
DIFFERENT = {
    "contrastive": ["not equal", "likely cause: a loss of several samples together"],
    "batch_normalization": ["not equal", "likely cause: BatchNormalization: each rank takes mean"],
    "running_range": [
        "rank 0 of 2 differs from one process after 1 step in ",
        "/top, which no optimizer updates",
        "likely cause: a variable that a layer or a step assigns from its part of a batch",
    ],
    "actor_critic": ["not trained together", "likely cause: a custom loop, which nobody divides"],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with_start_hook(tmp_path_factory.mktemp("installed") / "venv")


def verified(python: Path, directory: Path, *program: object) -> tuple[int, str]:
    command = [str(python), "-m", "gradring", "verify", "-np", "2", "--steps", "60"]
    done = completed([*command, "--with-strategy", *map(str, program)], cwd=directory)
    return done.returncode, done.stdout + done.stderr


def test_every_program_is_judged() -> None:
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {*EQUAL, *DIFFERENT}


def test_programs_that_train_as_one_process_does_are_equal(python: Path, tmp_path: Path) -> None:
    paths = [PROGRAMS / f"{name}.py" for name in EQUAL]
    code, text = verified(python, tmp_path, HERE / "together.py", *paths)
    assert code == 0, text
    assert "16 steps, 26 variables: equal within" in text


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_makes_others_differ_is_named(name: str, python: Path, tmp_path: Path) -> None:
    code, text = verified(python, tmp_path, PROGRAMS / f"{name}.py")
    assert code == 1, text
    assert not [words for words in DIFFERENT[name] if words not in text], text
