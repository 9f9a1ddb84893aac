"""Ranks started by a real ``mpirun`` of Open MPI, by the command of docs/clusters.md."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT, blocks_of, programs
from gradring.launch.ports import free_ports

CLUSTERS = ROOT / "docs" / "clusters.md"

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is missing: apt-get install openmpi-bin"
)


def test_the_command_of_the_document_reduces(tmp_path: Path) -> None:
    (command,) = (
        command
        for block in blocks_of(CLUSTERS)
        for command in block.commands
        if command.startswith("mpirun ")
    )
    (tmp_path / "sum.py").write_text(programs()["sum.py"])
    words = command.replace("29500", str(free_ports(1)[0])).split()
    words[words.index("python")] = sys.executable
    # On a machine with one core, and as root in a container, mpirun wants to be told.
    permits = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, **permits},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"0 2 0.5", "1 2 0.5"} <= set(done.stdout.splitlines())
