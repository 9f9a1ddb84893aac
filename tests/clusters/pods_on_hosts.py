"""Pods of an elastic job that end and come back, at addresses of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pods import Pod, python_environ

from elastic.observed import Job
from gradring.testing import Host


class PodsOnHosts:
    """Pods of an elastic job, each on a simulated host, of which there is one to spare."""

    def __init__(self, pods: list[Pod], hosts: Sequence[Host], directory: Path) -> None:
        """Starts all pods."""
        self._pods, self._places, self._spare = pods, list(hosts[:-1]), hosts[-1]
        self._names = directory / "hosts"
        self._log = directory / "log"
        self._started: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.job = Job(directory, self._log.read_text)
        for index in range(len(pods)):
            self.start(index)

    def __enter__(self) -> PodsOnHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def start(self, index: int, *, elsewhere: bool = False) -> None:
        """Starts a pod, on the host on which it was or on the spare one; DNS knows it at once."""
        if elsewhere:
            self._places[index], self._spare = self._spare, self._places[index]
        rows = [
            f"{host.address} {' '.join(pod.names)}"
            for host, pod in zip(self._places, self._pods, strict=True)
        ]
        # The same file, because it is mounted.
        self._names.write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
        pod = self._pods[index]
        script = f'mount --bind {self._names} /etc/hosts && exec "$@"'
        program = (sys.executable, str(self.job.program))
        inside = ("unshare", "--mount", "sh", "-c", script, "sh", *program)
        with self._log.open("ab") as log:
            self._running[index] = subprocess.Popen(
                self._places[index].command(*inside),
                env={**python_environ(), "HOSTNAME": pod.hostname, **pod.environ},
                stdout=log,
                stderr=log,
            )
        self._started.append(self._running[index])

    def end(self, index: int, signum: int) -> None:
        """Ends the process of a pod."""
        self._running[index].send_signal(signum)
        self._running[index].wait()

    def lose(self, index: int) -> None:
        """The host of a pod cannot be reached any more, and nobody is told."""
        self._places[index].cut()
