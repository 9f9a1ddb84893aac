"""Random programs train on ranks as in one process, and have all classes of Keras."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from program_fuzz import catalogue
from program_fuzz.features import FEATURES, drawn, has, settled
from program_fuzz.judge import differs
from program_fuzz.runs import Fuzz
from program_fuzz.source import source_of
from support.chosen import chosen

#: Few, because all are traced in each process; `make program-fuzz` has any number, and more ranks.
QUICK = range(4)
#: Programs that have a feature and little else; `tests/defects` has a defect that each finds.
WITH = {
    "a sum in a step": 1845,
    "a loss that is a sum": 511,
    "own draws": 1806,
    "rows of an embedding": 2273,
    "a sum by add_loss": 598,
    "clipping in a step": 738,
    "gradients of no tape": 2321,
    "a third in float64": 979,
}


@pytest.mark.timeout(1800)
def test_random_programs_train_on_ranks_as_in_one_process(tmp_path: Path) -> None:
    findings = Fuzz(tmp_path, [2]).run({seed: drawn(seed) for seed in QUICK})
    invalid = [f"seed {each.program['seed']}: {each.invalid}" for each in findings if each.invalid]
    assert len(invalid) <= 1, invalid
    assert not [
        f"{each.difference}\npython -m program_fuzz --seed {each.program['seed']}"
        for each in findings
        if each.difference
    ]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    names = chosen(request, "name")
    fuzz = Fuzz(tmp_path_factory.mktemp("programs"), [3])
    findings = fuzz.run({WITH[name]: drawn(WITH[name]) for name in names})
    return {
        name: each.invalid or each.difference for name, each in zip(names, findings, strict=True)
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WITH)
def test_a_program_trains_on_ranks_as_in_one_process_with(
    outcomes: dict[str, str], name: str
) -> None:
    assert outcomes[name] == ""


def test_a_seed_is_one_program_of_python_with_every_value_plain_or_not() -> None:
    for seed in range(300):
        program = drawn(seed)
        assert program == drawn(seed) == settled(program)
        compile(source_of(program), str(seed), "exec")
        reference = source_of(program, is_reference=True)
        assert "gradring" not in reference
        compile(reference, str(seed), "exec")


def test_every_feature_is_drawn() -> None:
    programs = [drawn(seed) for seed in range(1000)]
    for name in FEATURES:
        assert any(has(program, name) for program in programs), name
    doors = {program["door"] for program in programs}
    assert doors == {"given", "strategy", "loop", "reducer", "horovod"}
    assert {program["step"] for program in programs} == {None, *catalogue.STEPS}


def test_every_class_of_keras_is_in_programs_or_has_a_reason() -> None:
    import keras

    never = {name for names in catalogue.NEVER.values() for name in names}
    text = " ".join(source_of(drawn(seed)) for seed in range(3000))
    used = set(re.findall(r"\b[A-Z]\w+", text))
    bases = {
        keras.layers: keras.layers.Layer,
        keras.losses: keras.losses.Loss,
        keras.metrics: keras.metrics.Metric,
        keras.optimizers: keras.optimizers.Optimizer,
    }
    for module, base in bases.items():
        names: dict[type, set[str]] = {}
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
                names.setdefault(kind, set()).add(name)
        assert not [each for each in names.values() if not each & (used | never)]
        assert not [each for each in names.values() if each & used and each & never]


def test_a_difference_is_named_by_its_place_and_size() -> None:
    assert not differs({"a": [1.0, 2.0]}, {"a": [1.0, 2.0 + 1e-10]}, "float64")
    assert differs({"a": [1.0, 2.0]}, {"a": [1.0, 2.1]}, "float64").startswith(
        "a differs by 5.0e-02"
    )
    assert differs([[1.0]], [[1.0, 2.0]], "float64") == " has the shape (1, 2) in place of (1, 1)"
    assert "in one of them only" in differs({"a": 1.0}, {"b": 1.0}, "float64")
    assert differs([float("nan")], [1.0], "float64")
    assert not differs([float("nan")], [float("nan")], "float64")
