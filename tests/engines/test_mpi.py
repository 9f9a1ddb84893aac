"""Ranks started by real launchers of MPI programs, which need no setting of ours.

Those on the PATH, and those in environments that ``GRADRING_MPI_ENVIRONMENTS`` names, separated by
colons: `make test-engines` makes one each with Open MPI 5, MPICH 5 and Intel MPI, and with mpi4py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradring.machine.ports import free_ports
from support.documents import ROOT, blocks_of, programs

CLUSTERS = ROOT / "docs" / "clusters.md"
DEADLINE_S = 120
# On a machine with few cores, and as root in a container, Open MPI wants to be told.
PERMITS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Launcher:
    """An ``mpiexec``, and an interpreter that has mpi4py for its MPI, if there is one."""

    name: str
    mpiexec: str
    python: str | None

    @property
    def is_open_mpi(self) -> bool:
        return "open" in self.name

    def command(self, *words: object) -> list[str]:
        return [self.mpiexec, *map(str, words)]

    def start(self, *words: object, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            env={**clean_environ(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*words, **variables) as process:
            out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def clean_environ() -> dict[str, str]:
    """Ours without another launcher's variables, and with the packages of this interpreter."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GRADRING_", "SLURM_"))}
    return {**kept, **PERMITS, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def free_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def launchers() -> list[Launcher]:
    found = []
    for program in ("mpirun.openmpi", "mpiexec.mpich"):
        path = shutil.which(program)
        if path is not None:
            found.append(Launcher(f"system {program}", path, None))
    for directory in filter(None, os.environ.get("GRADRING_MPI_ENVIRONMENTS", "").split(":")):
        there = Path(directory).absolute() / "bin"
        found.append(Launcher(Path(directory).name, str(there / "mpiexec"), str(there / "python")))
    return found


FOUND = launchers()
pytestmark = pytest.mark.skipif(not FOUND, reason="no mpiexec: run make test-engines")
each_launcher = pytest.mark.parametrize("mpi", FOUND, ids=lambda mpi: mpi.name)
with_mpi4py = pytest.mark.parametrize(
    "mpi", [mpi for mpi in FOUND if mpi.python], ids=lambda mpi: mpi.name
)


def commands_of_the_document(mpi: Launcher) -> list[list[str]]:
    """The plain command, and that with an address, in this launcher's words."""
    option = "-x" if mpi.is_open_mpi else "-genv"
    found = [command.split() for block in blocks_of(CLUSTERS) for command in block.commands]
    plain = [c for c in found if c[0] == "mpirun" and c[1] == "-n"]
    return plain + [c for c in found if c[0] in ("mpirun", "mpiexec") and c[1] == option]


@each_launcher
def test_the_commands_of_the_document_reduce(mpi: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "sum.py"
    program.write_text(programs()["sum.py"])
    commands = commands_of_the_document(mpi)
    assert len(commands) == 2
    for _, *options, python, script in commands:
        assert (python, script) == ("python", "sum.py") and options[-2:] == ["-n", "4"]
        at = [word.replace("node-a:29500", free_address()) for word in options]
        done = mpi.run(*at, sys.executable, program)
        assert done.returncode == 0, done.stderr
        # Launchers may put pieces of the ranks' lines between each other.
        printed = "".join(f"{rank}41.5" for rank in range(4))
        assert sorted("".join(done.stdout.split())) == sorted(printed)


MIXED = """
import sys
if "before" in sys.argv:
    from mpi4py import MPI
import gradring, numpy as np
for _ in range(2):  # a second group of the same process meets at the same address
    with gradring.init() as comm:
        assert comm.all_reduce(np.array([comm.rank]))[0] == 1
if "after" in sys.argv:
    from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == 2
"""


@with_mpi4py
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_may_use_mpi_itself(mpi: Launcher, when: str, tmp_path: Path) -> None:
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    done = mpi.run("-n", 2, mpi.python, program, when)
    assert done.returncode == 0, done.stderr


JOB = """
import gradring, numpy as np, sys
with gradring.init() as comm:
    for _ in range(50):
        total = comm.all_reduce(np.array([int(sys.argv[1])]))[0]
    sys.stdout.write(f"sum {total}\\n")
"""


@each_launcher
def test_two_jobs_at_once_do_not_meet(mpi: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(JOB)
    jobs = [mpi.start("-n", 2, sys.executable, program, value) for value in (1, 10)]
    for job, total in zip(jobs, (2, 20), strict=True):
        with job:
            out, err = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, err
        assert re.findall(r"sum \d+", out) == [f"sum {total}"] * 2


FAILING = """
import gradring, numpy as np, sys
with gradring.init() as comm:
    if comm.rank == 1:
        raise ValueError("wrong data")
    comm.all_reduce(np.ones(3))
"""


@each_launcher
def test_a_rank_that_raises_ends_the_job_with_its_exception(mpi: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    done = mpi.run("-n", 2, sys.executable, program)
    assert done.returncode != 0
    assert "ValueError: wrong data" in done.stderr
    # Hydra says so of a rank that has left it in the middle of a conversation.
    assert "BAD TERMINATION" not in done.stdout + done.stderr


@each_launcher
def test_the_environment_is_explained_on_every_rank(mpi: Launcher) -> None:
    done = mpi.run("-n", 2, sys.executable, "-m", "gradring", "env")
    assert done.returncode == 0, done.stderr
    addresses = re.findall(r"rendezvous +(127\.0\.0\.1:\d+)", done.stdout)
    assert len(addresses) == 2 and len(set(addresses)) == 1
    assert len(re.findall("found in +(?:Open MPI|PMI)", done.stdout)) == 2


@each_launcher
def test_a_resolver_connects_strategies_of_tensorflow(mpi: Launcher, tmp_path: Path) -> None:
    """The program of the page, whose strategy prints how many replicas it has, and their sum."""
    program = tmp_path / "resolver.py"
    program.write_text(programs()["resolver.py"])
    done = mpi.run("-n", 2, sys.executable, program)
    assert done.returncode == 0, done.stderr
    assert "".join(sorted("".join(done.stdout.split()))) == "".join(sorted("22.0" * 2))


WRAPPER = (
    "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
)


@each_launcher
def test_a_program_that_a_rank_has_started_joins_or_is_told_what_to_set(
    mpi: Launcher, tmp_path: Path
) -> None:
    program, wrapper = tmp_path / "job.py", tmp_path / "wrapper.py"
    program.write_text(JOB)
    wrapper.write_text(WRAPPER)
    done = mpi.run("-n", 2, sys.executable, wrapper, program, 1)
    if mpi.is_open_mpi:
        assert done.returncode == 0, done.stderr
        return
    # Python closes the socket to mpiexec in what it starts.
    assert done.returncode != 0
    assert "PMI_FD is no socket to mpiexec in this process; set GRADRING_RENDEZVOUS" in done.stderr
    done = mpi.run("-n", 2, sys.executable, wrapper, program, 1, GRADRING_RENDEZVOUS=free_address())
    assert done.returncode == 0, done.stderr


LATE = """
import gradring, os, time
if os.environ.get("PMI_RANK") == "1":
    time.sleep(3600)  # never calls init(), as where it hangs in its input pipeline
gradring.init()
"""


@each_launcher
def test_a_rank_that_never_comes_ends_the_wait_for_the_address(
    mpi: Launcher, tmp_path: Path
) -> None:
    if mpi.is_open_mpi:
        pytest.skip("on one host, its ranks ask nobody")
    program = tmp_path / "late.py"
    program.write_text(LATE)
    with mpi.start("-n", 2, sys.executable, program, GRADRING_TIMEOUT_S="1") as job:
        assert job.stderr is not None
        told = next(line for line in job.stderr if "RendezvousError" in line)
        job.terminate()
    asked = "rank 0 of 2 cannot ask mpiexec for the address of rank 0 (PMI barrier_in: no answer"
    assert asked in told and told.count("cannot ask") == 1


HOSTS = ("node1", "node2")
SSH = """#!/bin/sh
# Stands in for ssh: enters the host's namespaces.
while :; do case $1 in -[xqTn]) shift;; -[olp]) shift 2;; *) break;; esac; done
host=$1; shift
exec nsenter --target "$(cat {directory}/$host.pid)" --net --uts sh -c "$*"
"""
NETWORK = """
mount --bind {directory}/hosts /etc/hosts
unshare --net --uts sleep {deadline_s} & node2=$!
while [ "$(readlink /proc/$node2/ns/uts)" = "$(readlink /proc/$$/ns/uts)" ]; do sleep 0.01; done
set -e
hostname node1
ip link set lo up
ip link add to-node2 type veth peer name to-node1 netns $node2
ip address add 10.77.0.1/24 dev to-node2
ip link set to-node2 up
there="nsenter --target $node2 --net --uts"
$there hostname node2
$there ip link set lo up
$there ip address add 10.77.0.2/24 dev to-node1
$there ip link set to-node1 up
echo $$ > {directory}/node1.pid
echo $node2 > {directory}/node2.pid
set +e
"$@"
status=$?
kill $node2
exit $status
"""
PLACES = """
import gradring, numpy as np, socket, sys
with gradring.init() as comm:
    comm.all_reduce(np.ones(3))
    sys.stdout.write(f"rank {comm.rank} of {comm.world_size} on {socket.gethostname()}\\n")
"""


def can_make_hosts() -> bool:
    namespaces = ["unshare", "--map-root-user", "--net", "--uts", "--mount"]
    script = ["sh", "-c", "ip link set lo up && hostname node1"]
    return bool(shutil.which("ip")) and subprocess.run([*namespaces, *script]).returncode == 0


def on_hosts(mpi: Launcher, hosts: tuple[str, ...], ssh: Path) -> list[object]:
    """The options with which two ranks run on each of these hosts."""
    if mpi.is_open_mpi:
        places = ["--map-by", "node", "--host", ",".join(f"{host}:2" for host in hosts)]
        if mpi.python is None:
            return [*places, "--mca", "plm_rsh_agent", ssh]
        prefix = Path(mpi.mpiexec).parents[1]
        return [*places, "--prefix", prefix, "--prtemca", "plm_ssh_agent", ssh]
    return ["-launcher", "ssh", "-launcher-exec", ssh, "-hosts", ",".join(hosts), "-ppn", 2]


@each_launcher
@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[::-1]], ids=["forwards", "backwards"])
def test_ranks_of_two_hosts_find_rank_0(
    mpi: Launcher, hosts: tuple[str, ...], tmp_path: Path
) -> None:
    if not can_make_hosts():
        pytest.skip("this system forbids namespaces, or has no iproute2")
    program, ssh, network = tmp_path / "places.py", tmp_path / "ssh", tmp_path / "network"
    program.write_text(PLACES)
    ssh.write_text(SSH.format(directory=tmp_path))
    ssh.chmod(0o755)
    network.write_text(NETWORK.format(directory=tmp_path, deadline_s=DEADLINE_S))
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    inside = ["unshare", "--map-root-user", "--net", "--uts", "--mount", "sh", network]
    command = mpi.command(*on_hosts(mpi, hosts, ssh), "-n", 4, sys.executable, program)
    done = subprocess.run(
        [*map(str, inside), *command],
        env={**clean_environ(), "GRADRING_TOKEN": "secret", "GRADRING_TIMEOUT_S": "60"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d) of 4 on (\w+)", done.stdout)
    assert sorted(rank for rank, _ in found) == list("0123")
    assert {host for _, host in found} == set(HOSTS)
