"""Ray Train on a real Ray cluster of three nodes on this machine, one of which is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("ray_training.py")
INTERPRETER = os.environ.get("GRADRING_RAY_PYTHON", sys.executable)
"""One that has Ray; `make test-engines` makes an environment of its own for it."""
TRAINING_S = 540.0


def why_not() -> str | None:
    code = "import ray.train, tensorflow, keras"
    try:
        done = subprocess.run([INTERPRETER, "-c", code], capture_output=True, timeout=120)
    except OSError as error:
        return f"{INTERPRETER}: {error.strerror}"
    return None if done.returncode == 0 else 'Ray is missing: pip install "ray[train]"'


pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(TRAINING_S + 60),
]


def driven(driver: Path, directory: Path) -> dict[str, Any]:
    """Runs a driver; the object that it prints."""
    done = subprocess.run(
        [INTERPRETER, str(driver), str(directory)],
        capture_output=True,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Ray's sockets need a short path; its workers must not see the tests' own modules.
    return driven(DRIVER, tmp_path_factory.mktemp("ray"))


def test_a_program_for_rays_trainer_of_tensorflow_stays_as_it_is(tmp_path: Path) -> None:
    """All arguments of Ray's trainer are taken, and its strategy is gradring's."""
    assert driven(DRIVER.with_name("ray_drop_in.py"), tmp_path) == {
        "of a worker": {
            "workers": 2,
            "config": {"value": 3},
            "ranks": 2,
            "own variable": "kept",
        },
        "run_config": {"env_vars": {"OWN_VARIABLE": "kept"}},
        "timeout_s": 60.0,
    }


def test_workers_on_three_nodes_form_one_group(trained: dict[str, Any]) -> None:
    first = [start for start in trained["started"] if start["first"] == 0]
    assert sorted(start["rank"] for start in first) == [0, 1, 2]
    assert {start["world_size"] for start in first} == {3}
    assert len({start["node"] for start in first}) == 3
    assert all(start["rank"] == start["world_rank"] for start in first)


def test_training_goes_on_from_the_checkpoint_after_a_node_is_lost(trained: dict[str, Any]) -> None:
    assert trained["nodes_left"] == 2
    again = [start for start in trained["started"] if start["first"] > 0]
    assert sorted(start["rank"] for start in again) == [0, 1, 2]
    assert len({start["node"] for start in again}) <= 2
    assert {start["world_size"] for start in again} == {3}
    assert trained["metrics"]["epoch"] == 5


def test_a_keras_3_model_is_trained_alike_on_all_workers(trained: dict[str, Any]) -> None:
    assert all(start["keras"].startswith("3.") for start in trained["started"])
    assert len(trained["weights"]) == 3 and len(set(trained["weights"])) == 1
    assert trained["metrics"]["loss"] < 1.0
