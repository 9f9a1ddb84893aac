"""A network of simulated hosts on this machine: Linux network namespaces behind one switch.

::

    with simulated_hosts(2, rate="1gbit") as hosts:
        gradring.testing.run_ranks(train, 2, hosts=hosts)

Needs root and the programs `ip` and `tc` (Debian: `apt install iproute2`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

#: What a limited link may send at once, in bytes: some milliseconds at 10 Gbit/s.
_BURST_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface, and its loopback."""

    #: Name of the namespace, as for `ip netns exec`.
    name: str
    #: IPv4 address of the interface.
    address: str
    _switch: str
    _port: str

    def command(self, *command: str) -> list[str]:
        """What runs `command` on this host, as the same process."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        """From now on loses every packet from and to this host; nobody is told."""
        _run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", self._port,
             "state", "disabled")  # fmt: skip

    def mend(self) -> None:
        """Ends a `cut`."""
        _run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", self._port,
             "state", "forwarding")  # fmt: skip


def why_unavailable() -> str | None:
    """What stands in the way of `simulated_hosts` here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "bridge") if not shutil.which(program)]
    if missing:
        return f"{' and '.join(missing)} not found; try: apt install iproute2"
    return None


@contextlib.contextmanager
def simulated_hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Hosts that reach one another through a switch, and nothing else.

    Args:
      count: number of hosts, 1 to 200.
      rate: bandwidth of each host's link in each direction, as `tc` writes it ("1gbit"); default:
        what the machine can do.

    Yields:
      The hosts, removed with the end of the block.

    Raises:
      RuntimeError: namespaces cannot be made here; says why.
    """
    if reason := why_unavailable():
        raise RuntimeError(f"cannot simulate hosts: {reason}")
    prefix = f"gradring-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"{prefix}-{i}", f"10.99.0.{i + 1}", switch, f"port{i}") for i in range(count)]
    made: list[str] = []
    try:
        for name in (switch, *(host.name for host in hosts)):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            _connect(host, rate)
        yield hosts
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def _connect(host: Host, rate: str | None) -> None:
    inside, outside = ("-n", host.name), ("-n", host._switch)
    _run("ip", *outside, "link", "add", host._port, "type", "veth",
         "peer", "name", "eth0", "netns", host.name)  # fmt: skip
    _run("ip", *outside, "link", "set", host._port, "master", "switch", "up")
    _run("ip", *inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", *inside, "link", "set", "eth0", "up")
    if rate is not None:
        for where, device in ((inside, "eth0"), (outside, host._port)):
            _run("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate,
                 "burst", str(_BURST_BYTES), "latency", "50ms")  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
