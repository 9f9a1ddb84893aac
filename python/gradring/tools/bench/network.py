"""The network between the ranks: this machine as it is, or one made for them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from gradring.errors import ConfigError
from gradring.machine import resources
from gradring.testing import simulated_hosts
from gradring.testing.network import Host

#: Makes gradring leave the choice to the host, as everything else does.
AS_THE_SYSTEM = {"GRADRING_TCP_CONGESTION": "system"}


def in_words(control: str | None) -> str:
    """What systems have under `network`."""
    own = "reno for gradring and link, which choose it in a host"
    return control or f"{resources.congestion_control()}; {own}"


@contextlib.contextmanager
def network(
    congestion: str | None = None, hosts: int = 1, rate: str | None = None
) -> Iterator[Sequence[Host]]:
    """Where ranks have to run: on simulated hosts, or here, as it is, if nothing is wanted.

    Args:
        congestion: TCP congestion control of everything that runs there. Some systems cannot choose
            for their own sockets; a network namespace has a default of its own, so that all get
            the same, and nothing else on the machine changes.
        hosts: Number of hosts.
        rate: Bandwidth of each host's link in each direction, as `tc` writes it.

    Yields:
        The hosts for the ranks; none for this machine as it is.

    Raises:
        ConfigError: The kernel does not have it, or this user may not choose.
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
