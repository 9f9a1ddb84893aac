"""A real Slurm cluster of three nodes on this machine, for as long as a test needs it.

munged, slurmctld and one slurmd per node run as root in a mount namespace of their own, in which
the names of the nodes are addresses of this machine, as DNS makes them in a real cluster. Nothing
outside of one directory is changed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gradring.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare")
NODES = ("node1", "node2", "node3")
DEADLINE_S = 120.0


def why_not() -> str | None:
    """Why no cluster can be started here; None when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd and mount namespaces need root"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        return "this system forbids mount namespaces (a container without CAP_SYS_ADMIN)"
    return None


class SlurmCluster:
    """A running cluster; commands of its users are run with :meth:`run`."""

    def __init__(self, directory: Path) -> None:
        """Notes where everything is; :func:`slurm_cluster` starts it."""
        self.directory = directory

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

    def start(self, *command: object) -> "subprocess.Popen[bytes]":
        """Starts a daemon, or a command that a test watches."""
        log = (self.directory / f"{Path(str(command[0])).name}.out").open("ab")
        with log:
            return subprocess.Popen(
                self._inside(*command), env=self.environ, stdout=log, stderr=log
            )

    @property
    def environ(self) -> dict[str, str]:
        """The variables of its users: none of another launcher, and where the configuration is."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "GRADRING_"))}
        return {**kept, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def _inside(self, *command: object) -> list[str]:
        hosts = self.directory / "hosts"
        script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh", *map(str, command)]


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Starts the cluster, and ends every process of it."""
    cluster = SlurmCluster(directory)
    _configure(directory)
    munge = directory / "munge"
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
        daemons += [cluster.start("slurmd", "-D", "-N", node) for node in NODES]

        def idle() -> bool:
            states = cluster.run("sinfo", "--noheader", "-N", "-o", "%T").stdout.split()
            return states == ["idle"] * len(NODES)

        _wait(idle, daemons, cluster, "all nodes are idle")
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _configure(directory: Path) -> None:
    controller_port, *node_ports = free_ports(1 + len(NODES))
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (directory / name).mkdir()
    directory.chmod(0o755)
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    addresses = {node: f"127.0.0.{11 + index}" for index, node in enumerate(NODES)}
    rows = [f"{address} {node}" for node, address in addresses.items()]
    (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
    host = os.uname().nodename
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr={addresses[node]} Port={port} CPUs=2"
        for node, port in zip(NODES, node_ports, strict=True)
    )
    (directory / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory / "munge" / "socket"}
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
