"""A host with another TCP congestion control, for everything that runs there."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

from gradring import machine
from gradring.errors import ConfigError
from gradring.testing import simulated_hosts
from gradring.testing.network import Host

#: Makes gradring leave the choice to the host, as everything else does.
AS_THE_SYSTEM = {"GRADRING_TCP_CONGESTION": "system"}


def in_words(control: str | None) -> str:
    """What systems have under `congested`."""
    own = "reno for gradring and link, which choose it in a host"
    return control or f"{machine.congestion_control()}; {own}"


@contextlib.contextmanager
def congested(control: str | None) -> Iterator[Sequence[Host]]:
    """Where ranks have to run to use ``control``: a simulated host; None: here, as it is.

    Some systems cannot choose for their own sockets. A network namespace has a default of its own,
    so that all get the same, and nothing else on the machine changes.

    Yields:
        The hosts for the ranks; none for this machine as it is.

    Raises:
        ConfigError: The kernel does not have it, or this user may not choose.
    """
    if control is None:
        yield ()
        return
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(simulated_hosts(1))
        except RuntimeError as error:
            raise ConfigError(
                f"--congestion {control}: {error}; without --congestion the systems are measured "
                "with whatever congestion control each of them has"
            ) from None
        setting = f"net.ipv4.tcp_congestion_control={control}"
        write = hosts[0].command("sysctl", "-q", "-w", setting)
        done = subprocess.run(write, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(
                f"--congestion {control}: {done.stderr.strip()}; "
                "see /proc/sys/net/ipv4/tcp_available_congestion_control"
            )
        yield hosts
