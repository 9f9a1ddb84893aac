"""Pods on this machine: what the kubelet makes of a manifest, and processes that see no more.

All pods share a network namespace without a way out, in which the names of a cluster's DNS are
addresses of the loopback interface. Nothing outside of one directory is changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SECRETS = {"gradring": {"token": "0123456789abcdef"}}
DEFAULT_MODE = 0o644
FS_GROUP_MODE = 0o440
"""What the kubelet adds for a group to the files of a read-only volume."""
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
UNSHARE = ["unshare", "--map-root-user", "--net", "--mount"]


@dataclass
class Pod:
    """One pod: its own name, all names that lead to it, and what its container sees."""

    hostname: str
    names: list[str]
    environ: dict[str, str] = field(default_factory=dict)


def why_not() -> str | None:
    """Why no pods can be made here; None when they can."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return "unshare is missing: apt-get install util-linux"
    return None if done.returncode == 0 else "this system forbids namespaces"


def documents(manifest: Path) -> dict[str, Any]:
    """The objects of a manifest by their kinds."""
    return {found["kind"]: found for found in yaml.safe_load_all(manifest.read_text())}


def mount_secret(volume: Mapping[str, Any], directory: Path, fs_group: int | None) -> None:
    """Lays a Secret out as the kubelet does: links, and modes that ``fsGroup`` extends."""
    data = directory / "..2026_11_22_15_40_00.123456789"
    data.mkdir(parents=True)
    (directory / "..data").symlink_to(data.name)
    mode = volume.get("defaultMode", DEFAULT_MODE) | (FS_GROUP_MODE if fs_group else 0)
    for key, text in SECRETS[volume["secretName"]].items():
        (data / key).write_text(text)
        (data / key).chmod(mode)
        (directory / key).symlink_to(Path("..data") / key)


def is_readable(file: Path, context: Mapping[str, int]) -> bool:
    """Whether a container's user could read what belongs to root and to the ``fsGroup``."""
    mode = file.stat().st_mode
    owner, group = context.get("runAsUser", 0) == 0, "fsGroup" in context
    return bool(owner or (group and mode & 0o040) or mode & 0o004)


def container_environ(
    container: Mapping[str, Any], fields: Mapping[str, str], mounts: Mapping[str, Path]
) -> dict[str, str]:
    """The variables of a container, with references resolved and mounts where they are here."""
    environ: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            text = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            text = SECRETS[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        else:
            text = variable["value"]
        assert isinstance(text, str), f"{variable}: Kubernetes takes text only"
        for mount, here in mounts.items():
            text = text.replace(mount, str(here))
        environ[variable["name"]] = text
    return environ


def run(pods: list[Pod], program: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program in every pod at once; their output together."""
    plan = directory / "plan.json"
    plan.write_text(json.dumps([vars(pod) for pod in pods]))
    return subprocess.run(
        [*UNSHARE, sys.executable, __file__, plan, program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def python_environ() -> dict[str, str]:
    """What Python itself needs of this process's variables."""
    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def _main(plan: Path, program: Path) -> int:
    """Inside of the namespaces: the pods, each with its own file of hosts, as the kubelet's."""
    _bring_loopback_up()
    pods = [Pod(**found) for found in json.loads(plan.read_text())]
    rows = [f"127.0.1.{10 + i} {' '.join(pod.names)}" for i, pod in enumerate(pods)]
    hosts = plan.with_name("hosts")
    hosts.write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
    script = f'mount --bind {hosts} /etc/hosts && exec "$@"'
    running = [
        subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, str(program)],
            env={**python_environ(), "HOSTNAME": pod.hostname, **pod.environ},
        )
        for pod in pods
    ]
    return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2])))
