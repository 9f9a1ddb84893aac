"""The file of ``gradring run --hostfile``: a host on each line, as in Open MPI and Horovod.

::

    # a comment
    node-a slots=4
    node-b:4
    [fd00::7]:2
    me@node-c slots=2 port=2222
    node-d                        # one rank; as many as it has lines, where it has several
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradring.launch.hosts import Host, parse_host, parse_port

#: Open MPI's keywords. No host gets more ranks than slots, so max_slots has no effect.
KEYWORDS = ("slots", "max_slots", "port", "username")


def read_hosts(path: Path) -> list[Host]:
    """Returns the hosts of a file, each once, in the order of their first lines.

    Batch systems such as PBS write a line for each slot, so the slots of equal hosts add up.

    Raises:
        ValueError: The file cannot be read, names no host, or has a line that is malformed.
    """
    hosts = hosts_in(_lines(path), str(path))
    if not hosts:
        raise ValueError(f"'{path}' names no host; write a line such as node-a slots=2 for each")
    return hosts


def hosts_in(lines: Sequence[str], source: str) -> list[Host]:
    """Returns the hosts of `lines`, perhaps none; ``source`` names the lines in messages.

    Raises:
        ValueError: A line is malformed.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        entry = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        try:
            if entry:
                _add(hosts, _parse_line(entry))
        except ValueError as error:
            raise ValueError(f"line {number} of {source}: {error}") from None
    return list(hosts.values())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"'{path}' is no text; write a line such as node-a slots=2") from None
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read ({error.strerror}); correct the path") from None


def _add(hosts: dict[str, Host], host: Host) -> None:
    known = hosts.setdefault(host.name, replace(host, slots=0))
    if (known.target, known.port) != (host.target, host.port):
        raise ValueError(f"{host.name!r} is named twice, with another user or port; correct one")
    hosts[host.name] = replace(known, slots=known.slots + host.slots)


def _parse_line(words: list[str]) -> Host:
    entry, values = words[0], dict(_keyword(word) for word in words[1:])
    if len(values) < len(words) - 1:
        raise ValueError(f"{' '.join(words)!r} says one thing twice; write it once")
    if "username" in values:
        if "@" in entry:
            raise ValueError(f"{entry!r} has its user twice; write it once")
        entry = f"{values['username']}@{entry}"
    host, port = parse_host(entry, values.get("slots")), values.get("port")
    return replace(host, port=None if port is None else parse_port(port, "port"))


def _keyword(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    name = name.replace("-", "_")
    if name not in KEYWORDS or not value:
        known = ", ".join(f"{keyword}=" for keyword in KEYWORDS)
        raise ValueError(f"{word!r} is not one of {known}; correct it")
    return name, value
