"""The network between the ranks: this machine's own, or a simulated one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from gradring.errors import ConfigError
from gradring.machine import resources
from gradring.testing import simulated_hosts
from gradring.testing.network import Host

#: Setting that makes gradring use the host's congestion control, as other systems do.
AS_THE_SYSTEM = {"GRADRING_TCP_CONGESTION": "system"}


def in_words(control: str | None) -> str:
    """Returns words for the congestion control of the systems under `network`."""
    own = "reno for gradring and link, which choose it in a host"
    return control or f"{resources.congestion_control()}; {own}"


@contextlib.contextmanager
def network(
    congestion: str | None = None, hosts: int = 1, rate: str | None = None
) -> Iterator[Sequence[Host]]:
    """Makes simulated hosts for the ranks; none for default arguments.

    Args:
        congestion: TCP congestion control of all systems. Some systems cannot set it for their
            sockets. A network namespace has its own default, so all systems get the same, and
            nothing else on the machine changes.
        hosts: Number of hosts.
        rate: Bandwidth of each host's link in each direction, in the form of `tc`.

    Yields:
        The hosts for the ranks; none for this machine's own network.

    Raises:
        ConfigError: The kernel does not have the congestion control, or this user cannot set it.
    """
    if congestion is None and hosts == 1:
        yield ()
        return
    wanted = f"--congestion {congestion}" if congestion else f"--hosts {hosts}"
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(simulated_hosts(hosts, rate))
        except RuntimeError as error:
            way_out = (
                "without --congestion the systems are measured with whatever congestion control "
                "each of them has"
                if congestion
                else "without --hosts all ranks are on this machine"
            )
            raise ConfigError(f"{wanted}: {error}; {way_out}") from None
        for host in made if congestion else ():
            setting = f"net.ipv4.tcp_congestion_control={congestion}"
            write = host.command("sysctl", "-q", "-w", setting)
            done = subprocess.run(write, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ConfigError(
                    f"{wanted}: {done.stderr.strip()}; "
                    "see /proc/sys/net/ipv4/tcp_available_congestion_control"
                )
        yield made
