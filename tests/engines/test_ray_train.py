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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Ray's sockets need a short path; its workers must not see the tests' own modules.
    directory = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [INTERPRETER, str(DRIVER), str(directory)],
        capture_output=True,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


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
