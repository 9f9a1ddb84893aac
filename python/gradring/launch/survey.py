"""Survey of the hosts before ranks are started on them: ssh, Python, gradring, free ports.

``python -m gradring.launch.survey COUNT`` runs on each host, and prints the version of gradring and
COUNT free ports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import gradring
from gradring.config.parse import MAX_PORT, integer, shown
from gradring.launch.guardian import Guardian
from gradring.launch.hosts import Host
from gradring.launch.processes import how_it_ended
from gradring.launch.question import Question
from gradring.launch.ssh import Ssh, last_line
from gradring.machine.ports import free_ports

ANY_ADDRESS = "0.0.0.0"
LIMIT_S = 60.0
SHOWN_LINES = 5


class SurveyError(OSError):
    """A host cannot run ranks; the message names it."""


def survey(
    hosts: Sequence[Host],
    ssh: Ssh,
    guardian: Guardian,
    goes_on: Callable[[], bool],
    *,
    held: ExitStack,
) -> dict[Host, list[int]]:
    """Returns free ports on each host, one for each of its slots; asks all hosts at once.

    Args:
        hosts: Hosts to survey.
        ssh: Access to hosts other than this machine.
        guardian: Kills the ssh clients if this process is killed.
        goes_on: Waits for a moment; returns False to cancel the survey.
        held: Passed to `free_ports` on this machine.

    Returns:
        The ports, in the order of the hosts; empty if the survey was cancelled.

    Raises:
        SurveyError: A host cannot be reached, or gradring cannot run there.
    """
    found: dict[Host, list[int]] = {}
    asked: dict[Host, Question] = {}
    try:
        for host in hosts:
            if host.is_local:
                found[host] = free_ports(host.slots, ANY_ADDRESS, held=held)
            else:
                now = time.monotonic()
                words = command(host, ssh)
                asked[host] = Question(words, os.environ, guardian, now=now, limit_s=LIMIT_S)
        while asked:
            if not goes_on():
                return {}
            for host, question in list(asked.items()):
                del asked[host]  # an answer or an error ends the question
                printed = question.answer(time.monotonic())
                if printed is None:
                    asked[host] = question
                else:
                    found[host] = ports_in(printed, host)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SurveyError(problem(error, host, ssh)) from None
    finally:
        for question in asked.values():
            question.close()
    return {host: found[host] for host in hosts}


def command(host: Host, ssh: Ssh) -> list[str]:
    """Returns the command that surveys a remote host; `ports_in` parses its output."""
    return ssh.command(host, __name__, str(host.slots))


def ports_in(printed: str, host: Host) -> list[int]:
    """Returns the free ports from a host's output.

    Raises:
        SurveyError: The host has another version of gradring.
        ValueError: The output has another form.
    """
    try:
        answer = last_line(printed)
    except ValueError:
        answer = None
    is_whole = isinstance(answer, dict) and answer.keys() == {"version", "ports"}
    if not is_whole or not isinstance(answer["ports"], list):
        raise ValueError(f"it printed {shown(printed)}, which names no ports")
    if answer["version"] != gradring.__version__:
        raise SurveyError(
            f"host {host.target} has gradring {shown(answer['version'])}, this one "
            f"{gradring.__version__}; install the same"
        )
    return [integer(port, "a port", minimum=1, maximum=MAX_PORT) for port in answer["ports"]]


def problem(error: Exception, host: Host, ssh: Ssh) -> str:
    """Returns the message for a host that cannot run ranks."""
    if isinstance(error, SurveyError):
        return str(error)
    if not host.is_local and shutil.which("ssh") is None:
        return "there is no program 'ssh'; install an ssh client"
    if isinstance(error, subprocess.TimeoutExpired):
        trial = ssh.trial(host)
        return f"host {host.target} did not answer within {LIMIT_S:g} s; try: {trial}"
    if isinstance(error, subprocess.CalledProcessError):
        said = " | ".join(error.stderr.strip().splitlines()[-SHOWN_LINES:]) or "nothing"
        return (
            f"host {host.target} cannot run ranks: ssh {how_it_ended(error.returncode)} and said: "
            f"{said} (ssh must work without a password: {ssh.trial(host)}; and {ssh.python} "
            "must have gradring: --python names another interpreter)"
        )
    trial = "" if host.is_local else f"; try: {ssh.trial(host)}"
    return f"host {host.target} cannot run ranks: {error}{trial}"


def main() -> None:
    """Prints the version and free ports as JSON."""
    ports = free_ports(int(sys.argv[1]), ANY_ADDRESS)
    print(json.dumps({"version": gradring.__version__, "ports": ports}))


if __name__ == "__main__":
    main()
