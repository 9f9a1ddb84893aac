"""Each command of docs/clusters.md that needs no other launcher; tests/engines has the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradring.launch.ports import free_ports

ROOT = Path(__file__).parents[2]
OTHERS = ("srun", "mpirun", "torchrun")

SSH = f"""#!{sys.executable}
import subprocess, sys
sys.exit(subprocess.call(["sh", "-c", sys.argv[-1]]))
"""


def commands() -> list[str]:
    """The lines of all blocks marked ``sh``, without their comments."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].rstrip() for block in blocks for line in block.splitlines()]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with the README's program, and the programs that the commands name."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n# sum\.py\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    (tmp_path / "sum.py").write_text(found[1])
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "gradring").write_text(f'#!/bin/sh\nexec {sys.executable} -m gradring "$@"\n')
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def run(command: str, workplace: Path) -> "subprocess.CompletedProcess[str]":
    port = free_ports(1)[0]
    hosts = {"node-a": "127.0.0.2", "node-b": "127.0.0.3", "/opt/venv/bin/python": sys.executable}
    for name, here in {**hosts, "29500": str(port)}.items():
        command = command.replace(name, here)
    search = os.pathsep.join([str(workplace), os.environ.get("PYTHONPATH", "")])
    path = os.pathsep.join([str(workplace / "bin"), os.environ["PATH"]])
    return subprocess.run(
        ["sh", "-c", command],
        cwd=workplace,
        # Buffered, so that ranks without a launcher do not write into each other's lines.
        env={**os.environ, "PATH": path, "PYTHONPATH": search, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith(OTHERS)])
def test_a_command_of_the_document_does_what_it_says(command: str, workplace: Path) -> None:
    done = run(command, workplace)
    if "doctor" in command and not command.startswith("gradring run"):
        # What it finds depends on the other jobs of this machine.
        wanted = "nobody listens" if "127.0.0.1" in command else "found in    nothing"
        assert wanted in done.stdout, done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    if "doctor" in command:
        assert "all 2 ranks reach each other" in done.stdout
    elif "env" in command.split():
        assert "because     no launcher's variables are set" in done.stdout
    else:
        world_size = 4 if "--hosts" in command else 2
        mean = sum(range(world_size)) / world_size
        lines = {line.partition("] ")[2] or line for line in done.stdout.splitlines()}
        assert {f"{rank} {world_size} {mean}" for rank in range(world_size)} <= lines


def test_the_certificates_of_the_document_let_two_hosts_meet(workplace: Path) -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    (script,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    addresses = {"node-a": "127.0.0.2", "node-b": "127.0.0.3"}
    script = script.replace("10.0.0.5", addresses["node-a"]).replace("10.0.0.6", "127.0.0.3")
    subprocess.run(["sh", "-ec", script], cwd=workplace, check=True, capture_output=True)
    rendezvous = f"{addresses['node-a']}:{free_ports(1)[0]}"
    ranks = []
    for rank, (name, address) in enumerate(addresses.items()):
        environ = {
            **os.environ,
            "GRADRING_RANK": str(rank),
            "GRADRING_WORLD_SIZE": "2",
            "GRADRING_RENDEZVOUS": rendezvous,
            "GRADRING_TOKEN": "certificates-are-not-enough",
            "GRADRING_TRANSPORT": "tcp",
            "GRADRING_INTERFACE": address,
            "GRADRING_TLS_CA": str(workplace / name / "ca.pem"),
            "GRADRING_TLS_CERT": str(workplace / name / "rank.pem"),
            "GRADRING_TLS_KEY": str(workplace / name / "rank.key"),
        }
        command = [sys.executable, "sum.py"]
        ranks.append(
            subprocess.Popen(command, cwd=workplace, env=environ, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=120)[0].splitlines()[:1] for process in ranks]
    assert said == [["0 2 0.5"], ["1 2 0.5"]]


def test_every_launcher_is_in_the_document() -> None:
    assert {command.split()[0] for command in commands()} >= {"gradring", *OTHERS}
