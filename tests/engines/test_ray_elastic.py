"""An elastic job of Ray's actors: those that die are replaced, also with their node."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_ray_train import INTERPRETER, TRAINING_S, why_not

from support.documents import ROOT

EXAMPLE = ROOT / "examples" / "ray_elastic.py"
JOB = Path(__file__).with_name("ray_elastic_job.py")

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(TRAINING_S + 60),
]


def test_actors_that_die_are_replaced_and_join_the_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # Ray's sockets need a short path.
    directory = tmp_path_factory.mktemp("ray")
    shutil.copy(EXAMPLE, directory)
    done = subprocess.run(
        [INTERPRETER, str(JOB), str(directory)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=TRAINING_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
