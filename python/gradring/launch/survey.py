"""Looks at the hosts before ranks are started on them: ssh, Python, gradring, free ports.

Run as ``python -m gradring.launch.survey COUNT`` on each host, it prints what it found there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import gradring
from gradring.launch.hosts import Host
from gradring.launch.ssh import Ssh
from gradring.ports import free_ports

ANY_ADDRESS = "0.0.0.0"
LIMIT_S = 60.0
SHOWN_LINES = 5


class SurveyError(OSError):
    """A host cannot run ranks; the message names it."""


def survey(hosts: Sequence[Host], ssh: Ssh) -> dict[Host, list[int]]:
    """Free ports on each host, one for each of its slots; all hosts are asked at once.

    Args:
        hosts: Where to look.
        ssh: How to get to those that are not this machine.

    Raises:
        SurveyError: A host cannot be reached, or gradring cannot run there.
    """
    with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
        found = threads.map(lambda host: _ports_of(host, ssh), hosts)
        return dict(zip(hosts, found, strict=True))


def _ports_of(host: Host, ssh: Ssh) -> list[int]:
    if host.is_local:
        return free_ports(host.slots, ANY_ADDRESS)
    try:
        answer = ssh.ask(host, __name__, str(host.slots), limit_s=LIMIT_S)
    except FileNotFoundError:
        raise SurveyError("there is no program 'ssh'; install an ssh client") from None
    except subprocess.TimeoutExpired:
        raise SurveyError(
            f"host {host.target} did not answer within {LIMIT_S:g} s; try: {ssh.trial(host)}"
        ) from None
    except subprocess.CalledProcessError as error:
        said = " | ".join(error.stderr.strip().splitlines()[-SHOWN_LINES:]) or "nothing"
        raise SurveyError(
            f"host {host.target} cannot run ranks: ssh ended with exit code {error.returncode} and "
            f"said: {said} (ssh must work without a password: {ssh.trial(host)}; and {ssh.python} "
            "must have gradring: --python names another interpreter)"
        ) from None
    if answer["version"] != gradring.__version__:
        raise SurveyError(
            f"host {host.target} has gradring {answer['version']}, this one "
            f"{gradring.__version__}; install the same"
        )
    return list(answer["ports"])


def main() -> None:
    """Prints the version and free ports as JSON."""
    ports = free_ports(int(sys.argv[1]), ANY_ADDRESS)
    print(json.dumps({"version": gradring.__version__, "ports": ports}))


if __name__ == "__main__":
    main()
