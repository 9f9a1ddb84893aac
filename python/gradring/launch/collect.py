"""Collection of the timeline's parts that ranks have written on other hosts.

A rank on another host writes its part into a temporary directory made by `remote_rank`. When all
ranks have ended, ``python -m gradring.launch.collect JOB`` runs on each host over ssh, prints the
parts and removes them.
"""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gradring.config.parse import shown
from gradring.launch.hosts import Host
from gradring.launch.ssh import Ssh
from gradring.records.paths import parts_of, written

#: Time limit for one host: a host that is gone must not delay the launcher for long.
LIMIT_S = 30.0
JOB_BYTES = 8
TRACE_NAME = "timeline.json"


def new_job() -> str:
    """Returns a random name for one run, so that nobody can prepare its directory."""
    return secrets.token_hex(JOB_BYTES)


def trace_of(job: str) -> Path:
    """Returns the timeline file whose parts ranks on this host write.

    Raises:
        ValueError: ``job`` is not a name made by `new_job`.
    """
    if len(bytes.fromhex(job)) != JOB_BYTES:
        raise ValueError(f"{job!r} names no run")
    return Path(tempfile.gettempdir(), f"gradring-{job}", TRACE_NAME)


def make_room(job: str) -> Path:
    """Makes the directory of `trace_of`, which no other user can enter; returns the file."""
    trace = trace_of(job)
    trace.parent.mkdir(mode=0o700, exist_ok=True)
    return trace


def collect(hosts: Sequence[Host], ssh: Ssh, job: str, trace: Path) -> list[str]:
    """Copies the parts of all ranks on ``hosts`` to this machine, from all hosts at once.

    Args:
        hosts: Hosts to reach by ssh, each once.
        ssh: Access to the hosts.
        job: The run's name, made by `new_job`.
        trace: The file of the timeline.

    Returns:
        A sentence for each host whose parts could not be read.
    """
    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
        problems = threads.map(lambda host: _bring(host, ssh, job, parts_of(trace)), hosts)
        return [problem for problem in problems if problem]


def _bring(host: Host, ssh: Ssh, job: str, parts: Path) -> str | None:
    try:
        packed = ssh.ask(host, __name__, job, limit_s=LIMIT_S)
        found = json.loads(zlib.decompress(base64.b64decode(packed)))
        for name, text in found.items():
            part = parts / name
            if parts.resolve() not in part.resolve().parents:
                raise ValueError(f"{shown(name)} is no name of a part")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return f"the timeline's parts on {host.name} cannot be had: {said[-1] if said else error}"
    except (OSError, subprocess.SubprocessError, ValueError, zlib.error) as error:
        return f"the timeline's parts on {host.name} cannot be had: {error}"
    return None


def main() -> None:
    """Prints the parts on this host in one line, and removes them."""
    trace = trace_of(sys.argv[1])
    parts = parts_of(trace)
    found = {str(path.relative_to(parts)): path.read_text() for path in written(parts)}
    print(json.dumps(base64.b64encode(zlib.compress(json.dumps(found).encode())).decode()))
    shutil.rmtree(trace.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
