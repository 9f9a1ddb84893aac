"""TensorFlow's own parameter servers, which wait for a chief, under ``gradring run --ps``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradring.errors import ConfigError
from gradring.machine.ports import free_ports
from gradring_start import no_chief
from support.documents import programs
from support.installed import environment_with_start_hook

QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """That of the page, which is TensorFlow's alone."""
    path = tmp_path / "scheduled.py"
    path.write_text(programs()[path.name])
    return path


def test_a_program_of_tensorflows_servers_says_that_there_is_no_chief(
    program: Path, tmp_path: Path
) -> None:
    python = environment_with_start_hook(tmp_path / "environment")
    done = subprocess.run(
        [python, "-m", "gradring", "run", "-np", "2", "--ps", "1", program],
        env=QUIET,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    for worker in (0, 1):
        said = f"[{worker}] gradring.errors.ConfigError: worker {worker} would wait without limit"
        assert said in done.stderr


@pytest.mark.slow
def test_the_program_of_the_page_trains_under_tensorflow(program: Path) -> None:
    places = [("worker", 0), ("worker", 1), ("ps", 0), ("chief", 0)]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(places))]
    cluster: dict[str, list[str]] = {}
    for (job, _), address in zip(places, addresses, strict=True):
        cluster.setdefault(job, []).append(address)
    *others, chief = (
        subprocess.Popen(
            [sys.executable, program],
            env={
                **QUIET,
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": job, "index": index}}
                ),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for job, index in places
    )
    try:
        printed, _ = chief.communicate(timeout=240)
    finally:
        for process in (*others, chief):
            process.kill()
            process.communicate()
    assert printed == "weight [ 2. -1.]\n"


def imitation(*, eager: bool = True) -> Any:
    """What of TensorFlow is asked; `joined` and `made` note what is TensorFlow's again."""

    class Server:
        joined = False

        def __init__(self, job: str, *jobs: str) -> None:
            known = [SimpleNamespace(name=name) for name in jobs]
            cluster = SimpleNamespace(job=known)
            self.server_def = SimpleNamespace(job_name=job, task_index=1, cluster=cluster)

        def join(self) -> None:
            self.joined = True

    class Strategy:
        made: Any = None

        def __init__(self, cluster_resolver: Any, variable_partitioner: Any = None) -> None:
            self.made = variable_partitioner

    distribute = SimpleNamespace(Server=Server, ParameterServerStrategy=Strategy)
    made = SimpleNamespace(distribute=distribute, executing_eagerly=lambda: eager)
    no_chief.install(made)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("jobs", "eager", "waits"),
    [
        (("worker", "worker", "ps"), True, False),
        (("worker", "chief", "worker", "ps"), True, True),
        (("worker", "master", "worker", "ps"), True, True),
        (("ps", "worker", "ps"), True, True),
        # Without servers it is another kind of job, and with sessions one of TensorFlow 1.
        (("worker", "worker"), True, True),
        (("worker", "worker", "ps"), False, True),
    ],
)
def test_a_worker_of_servers_without_a_chief_does_not_wait(
    jobs: tuple[str, ...], eager: bool, waits: bool
) -> None:
    server = imitation(eager=eager).distribute.Server(*jobs)
    if waits:
        server.join()
        assert server.joined
        return
    with pytest.raises(ConfigError, match="worker 1 would wait without limit"):
        server.join()
    assert not server.joined


@pytest.mark.parametrize(
    ("task", "jobs", "is_made"),
    [
        ("worker", ["worker", "ps"], False),
        ("chief", ["chief", "worker", "ps"], True),
        (None, ["worker", "ps"], True),
    ],
)
def test_a_worker_makes_no_strategy_that_waits_for_a_chief(
    task: str | None, jobs: list[str], is_made: bool
) -> None:
    spec = SimpleNamespace(jobs=jobs)
    resolver = SimpleNamespace(task_type=task, task_id=0, cluster_spec=lambda: spec)
    make = imitation().distribute.ParameterServerStrategy
    if is_made:
        assert make(resolver, variable_partitioner=3).made == 3
        return
    with pytest.raises(ConfigError, match="worker 0 would wait"):
        make(resolver)
