"""A real Slurm cluster of three nodes on this machine, for as long as a test needs it.

slurmd of each node runs as root on a simulated host, with an address of its own and a network that
a test can cut. In a mount namespace, the names of the nodes are these addresses, as DNS makes them
in a real cluster. munged and slurmctld run on the first node, and so do the users' commands.
Nothing outside of one directory is changed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gradring.testing import Host, simulated_hosts
from gradring.testing.network import why_unavailable

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare")
NODES = ("node1", "node2", "node3")
CONTROLLER_PORT, NODE_PORT = 6817, 6818
DEADLINE_S = 120.0


def why_not() -> str | None:
    """Why no cluster can be started here; None when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd and mount namespaces need root"
    return why_unavailable()


class SlurmCluster:
    """A running cluster; commands of its users are run with :meth:`run`."""

    def __init__(self, directory: Path, hosts: Sequence[Host]) -> None:
        """Notes where everything is; :func:`slurm_cluster` starts it."""
        self.directory = directory
        self.hosts = dict(zip(NODES, hosts, strict=True))

    def run(
        self, *command: object, timeout_s: float = DEADLINE_S, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a command to its end, as if on a login node."""
        return subprocess.run(
            self._inside(*command),
            env={**self.environ, **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *command: object, node: str = NODES[0]) -> "subprocess.Popen[bytes]":
        """Starts a daemon, or a command that a test watches."""
        log = (self.directory / f"{Path(str(command[0])).name}.out").open("ab")
        with log:
            return subprocess.Popen(
                self._inside(*command, node=node), env=self.environ, stdout=log, stderr=log
            )

    def idle(self) -> bool:
        """Whether all nodes are there, without a job."""
        states = self.run("sinfo", "--noheader", "-N", "-o", "%T").stdout.split()
        return states == ["idle"] * len(NODES)

    @contextlib.contextmanager
    def without(self, node: str) -> Iterator[None]:
        """Loses a node and all that runs there, as if its power had failed; it comes back later."""
        self.hosts[node].cut()
        try:
            # What slurmctld says of itself after SlurmdTimeout.
            self._update(node, "DOWN")
            yield
        finally:
            self.hosts[node].mend()
            self._update(node, "RESUME")

    def _update(self, node: str, state: str) -> None:
        done = self.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
        assert done.returncode == 0, done.stderr

    @property
    def environ(self) -> dict[str, str]:
        """The variables of its users: none of another launcher, and where the configuration is."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GRADRING_"))}
        return {**kept, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def _inside(self, *command: object, node: str = NODES[0]) -> list[str]:
        hosts = self.directory / "hosts"
        script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        inside = ("unshare", "--mount", "sh", "-c", script, "sh", *map(str, command))
        # Not `Host.command`: where that leads, slurmd misses the control groups of /sys.
        return ["nsenter", f"--net=/run/netns/{self.hosts[node].name}", *inside]


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Starts the cluster, and ends every process of it."""
    with simulated_hosts(len(NODES)) as hosts:
        cluster = SlurmCluster(directory, hosts)
        _configure(cluster)
        try:
            with _daemons(cluster):
                yield cluster
        finally:
            _end_all_that_is_left(hosts)


@contextlib.contextmanager
def _daemons(cluster: SlurmCluster) -> Iterator[None]:
    munge = cluster.directory / "munge"
    daemons = [
        cluster.start(
            *("munged", "--foreground", "--force", f"--key-file={munge / 'key'}"),
            *(f"--socket={munge / 'socket'}", f"--pid-file={munge / 'pid'}"),
            *(f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}"),
        )
    ]
    try:
        _wait((munge / "socket").exists, daemons, cluster, "munged listens")
        daemons.append(cluster.start("slurmctld", "-D"))
        daemons += [cluster.start("slurmd", "-D", "-N", node, node=node) for node in NODES]
        _wait(cluster.idle, daemons, cluster, "all nodes are idle")
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _end_all_that_is_left(hosts: Sequence[Host]) -> None:
    """Ends the tasks of jobs that a test has not waited for, as on a node that was lost."""
    for host in hosts:
        listed = subprocess.run(
            ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _configure(cluster: SlurmCluster) -> None:
    directory = cluster.directory
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (directory / name).mkdir()
    directory.chmod(0o755)
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    rows = [f"{host.address} {node}" for node, host in cluster.hosts.items()]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
    name = os.uname().nodename
    # By the weights, tasks that fit into few nodes go to the first ones.
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={name} NodeAddr={host.address} Port={NODE_PORT} CPUs=2 "
        f"Weight={weight}"
        for weight, (node, host) in enumerate(cluster.hosts.items(), 1)
    )
    (directory / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={name}({cluster.hosts[NODES[0]].address})
SlurmctldPort={CONTROLLER_PORT}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={directory / "munge" / "socket"}
KillWait=5
CredType=cred/munge
StateSaveLocation={directory / "state"}
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
    )


def _wait(
    condition: Callable[[], bool],
    daemons: list["subprocess.Popen[bytes]"],
    cluster: SlurmCluster,
    what: str,
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "".join(
                f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
                for path in [*cluster.directory.glob("*.out"), *cluster.directory.glob("*.log")]
            )
            raise RuntimeError(f"never: {what}; ended: {ended}\n{logs}")
        time.sleep(0.2)
