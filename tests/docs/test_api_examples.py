"""Every public name has an example, which runs on two ranks and prints on rank 0 what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from api_names import MODULES, documented, examples, module_of
from interactive_sessions import on_a_rank, problems_of, under_horovods_names

import gradring
from gradring.testing import run_ranks

EXAMPLES = examples()
NUMPY = {"np": "numpy"}
TENSORFLOW = {**NUMPY, "tf": "tensorflow", "keras": "keras"}
HOROVOD = "gradring.horovod.tensorflow"
#: How callbacks begin that a program does not call itself.
CALLED_BY_KERAS = ("on_train_", "on_epoch_", "on_test_")
#: What statistics tell of.
OTHER_SETTINGS = {"TRANSPORT": "tcp", "STREAMS": "2", "CHECKSUM": "1", "ALGORITHM": "ring"}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where examples write their files."""
    monkeypatch.chdir(tmp_path)


def sessions(*modules: str) -> dict[str, str]:
    """The examples of modules and of what they have."""
    return {path: text for path, text in EXAMPLES.items() if module_of(path) in modules}


def shows(path: str) -> bool:
    """Whether there is an example: its own, or one of its class or module with its name."""
    if path in EXAMPLES:
        return True
    above, _, name = path.rpartition(".")
    while above:
        if re.search(rf"\b{name}\b", EXAMPLES.get(above, "")):
            return True
        # What a module around that one shows by this name is something else.
        above = "" if above in MODULES else above.rpartition(".")[0]
    return False


def test_every_public_name_has_an_example() -> None:
    missing = [path for path in documented() if path not in MODULES and not shows(path)]
    assert not [path for path in missing if not path.rpartition(".")[2].startswith(CALLED_BY_KERAS)]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("groups", NUMPY),
        ("errors", NUMPY),
        ("tensorflow", TENSORFLOW),
        ("update-rules", TENSORFLOW),
    ],
)
def test_examples_print_what_they_say(page: str, names: dict[str, str]) -> None:
    found = sessions(*(module for module, at in MODULES.items() if at == page))
    assert run_ranks(on_a_rank, 2, found, names) == [[], []]


def test_examples_of_statistics_print_the_same_with_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in OTHER_SETTINGS.items():
        monkeypatch.setenv(f"GRADRING_{name}", text)
    assert run_ranks(on_a_rank, 2, sessions("gradring.stats"), NUMPY) == [[], []]


def test_examples_of_horovods_names_print_what_they_say() -> None:
    found = {
        HOROVOD: sessions(*(f"{HOROVOD}{of}" for of in ("", ".elastic", ".data.compute_service"))),
        f"{HOROVOD}.keras": sessions(
            *(f"{HOROVOD}.keras{of}" for of in ("", ".callbacks", ".elastic"))
        ),
    }
    assert run_ranks(under_horovods_names, 2, found) == [[], []]


PROGRAMS = sessions("gradring.notebook", "gradring.ray", "gradring.testing")


@pytest.fixture(scope="module")
def started_ray() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray pins versions; make test-engines has it")
    with pytest.MonkeyPatch.context() as patched:
        # Ray makes its workers nice, and on a busy machine they would hardly start.
        patched.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, log_to_driver=False)
        yield
        ray.shutdown()


# Ray warns of what it does itself.
@pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning")
@pytest.mark.parametrize("path", PROGRAMS)
def test_examples_of_programs_print_what_they_say(
    path: str, request: pytest.FixtureRequest
) -> None:
    if module_of(path) == "gradring.ray":
        request.getfixturevalue("started_ray")
    if "simulated_hosts" in PROGRAMS[path]:
        request.getfixturevalue("simulated_hosts_are_possible")
    assert not problems_of(path, PROGRAMS[path], 0, gradring=gradring, np=np)
