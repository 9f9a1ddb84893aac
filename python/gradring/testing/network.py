"""A network of simulated hosts on this machine: Linux network namespaces behind one switch.

::

    with simulated_hosts(2, rate="1gbit") as hosts:
        gradring.testing.run_ranks(train, 2, hosts=hosts)

Needs root and the programs `ip` and `tc` (Debian: `apt install iproute2`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

#: Largest burst of a limited link in bytes: about a millisecond at 10 Gbit/s.
_BURST_BYTES = 1 << 20
_networks = itertools.count()

#: Number of separately limited flows; further flows share one of these limits.
_FLOWS = 256


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface, and its loopback.

    Attributes:
        name: Name of the namespace, for ``ip netns exec``.
        address: IPv4 address of the interface.
        switch: Namespace of the bridge that connects the hosts.
        port: Name of the host's interface in that namespace.

    Examples:
        >>> import socket
        >>> with gradring.testing.simulated_hosts(2) as (first, second):
        ...     first.command("ip", "address")
        ...     port = (second.address, 80)
        ...     def call():
        ...         run = gradring.testing.run_ranks
        ...         return run(socket.create_connection, 1, port, 1.0, check=False, hosts=[first])
        ...     call()[0].exception  # nothing listens there, and it says so
        ...     second.cut()
        ...     call()[0].exception
        ...     second.mend()
        ...     call()[0].exception
        ['ip', 'netns', 'exec', 'gradring-...-0', 'ip', 'address']
        ConnectionRefusedError(111, 'Connection refused')
        TimeoutError('timed out')
        ConnectionRefusedError(111, 'Connection refused')
    """

    name: str
    address: str
    switch: str
    port: str

    def command(self, *command: str) -> list[str]:
        """Returns the command line that runs `command` on this host; `ip` executes it in place.

        Args:
            command: A program and its arguments.
        """
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        """Drops every packet from and to this host from now on; connections stay open."""
        self._set("disabled")

    def mend(self) -> None:
        """Ends a `cut`."""
        self._set("forwarding")

    def _set(self, state: str) -> None:
        bridge = ("bridge", "link", "set", "dev", self.port, "state", state)
        _run("ip", "netns", "exec", self.switch, *bridge)


def why_unavailable() -> str | None:
    """Returns the reason why `simulated_hosts` cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "bridge") if not shutil.which(program)]
    if missing:
        return f"{' and '.join(missing)} not found; try: apt install iproute2"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode != 0:
        return "this system forbids network namespaces (a container without CAP_SYS_ADMIN)"
    return None


@contextlib.contextmanager
def simulated_hosts(
    count: int, rate: str | None = None, flow_rate: str | None = None
) -> Iterator[list[Host]]:
    """Makes hosts that reach each other through a switch, and no other network.

    Args:
      count: number of hosts, 1 to 200.
      rate: bandwidth of each host's link in each direction, in the form of `tc` ("1gbit"); default:
            no limit.
      flow_rate: bandwidth of each outgoing connection, as clouds limit it; default: no limit.

    Yields:
      The hosts, removed with the end of the block.

    Raises:
      RuntimeError: namespaces cannot be made here; the message has the reason.

    Examples:
        >>> import os
        >>> with gradring.testing.simulated_hosts(2, rate="1gbit") as hosts:
        ...     [host.address for host in hosts]
        ...     gradring.testing.run_ranks(os.getenv, 2, "GRADRING_RENDEZVOUS", hosts=hosts)
        ['10.99.0.1', '10.99.0.2']
        ['10.99.0.1:29500', '10.99.0.1:29500']
    """
    if reason := why_unavailable():
        raise RuntimeError(f"cannot simulate hosts: {reason}")
    prefix = f"gradring-{os.getpid()}-{next(_networks)}"
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
            _connect(host, rate, flow_rate)
        yield hosts
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def _connect(host: Host, rate: str | None, flow_rate: str | None) -> None:
    inside, outside = ("-n", host.name), ("-n", host.switch)
    _run("ip", *outside, "link", "add", host.port, "type", "veth",
         "peer", "name", "eth0", "netns", host.name)  # fmt: skip
    _run("ip", *outside, "link", "set", host.port, "master", "switch", "up")
    _run("ip", *inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    _run("ip", *inside, "link", "set", "eth0", "up")
    ends = [(outside, host.port)]
    if flow_rate is None:
        ends.append((inside, "eth0"))
    else:
        _run("tc", *inside, "-batch", "-", given=_flow_limits("eth0", flow_rate))
    if rate is not None:
        for where, device in ends:
            _run("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate,
                 "burst", str(_BURST_BYTES), "latency", "50ms")  # fmt: skip


def _flow_limits(device: str, rate: str) -> str:
    """Returns commands for `tc`: a class for each value of the low byte of the source port.

    `fq maxrate` would be one line, but not every kernel has it. A host's source ports are
    consecutive, so its connections to a peer differ in this byte.
    """
    filters = f"filter add dev {device} parent 1: prio 1 protocol ip u32"
    lines = [
        f"qdisc add dev {device} root handle 1: htb",
        f"filter add dev {device} parent 1: prio 1 handle 2: protocol ip u32 divisor {_FLOWS}",
    ]
    for flow in range(_FLOWS):
        lines += [
            f"class add dev {device} parent 1: classid 1:{flow + 1:x} htb rate {rate} "
            f"burst {_BURST_BYTES} cburst {_BURST_BYTES} quantum 60000",
            f"{filters} ht 2:{flow:x}: match u8 0 0 flowid 1:{flow + 1:x}",
        ]
    lines.append(f"{filters} ht 800:: match u8 0 0 hashkey mask 0x00ff0000 at 20 link 2:")
    return "\n".join(lines) + "\n"


def _run(*command: str, given: str | None = None) -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
