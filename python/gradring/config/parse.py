"""Parsing of text from outside into checked values: addresses, ports, numbers, names, ranks."""

from __future__ import annotations

import math
import numbers
import operator
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradring.errors import ConfigError

RENDEZVOUS, JOB_ID, PORT = "GRADRING_RENDEZVOUS", "GRADRING_JOB_ID", "GRADRING_PORT"
#: Variable with addresses of a running job, for a process that joins the job.
JOIN = "GRADRING_JOIN"
#: Signal by which `gradring run` informs a waiting joiner that the job has ended well without it.
#: Linux ignores this signal in processes without a handler.
JOB_HAS_ENDED = signal.SIGURG
#: Default port of rank 0, for launchers that give its host only; also torch's and Kubeflow's.
DEFAULT_PORT = 29500
MAX_PORT = 65535
MAX_DIGITS = 18
#: Largest accepted world size; a larger one is a mistake, because rank 0 could not hold that many
#: connections.
MAX_WORLD_SIZE = 2048
#: Limit of a job's name in bytes, because every rank receives the name from every other.
MAX_JOB_ID = 64
#: Limit of a wrong value in a message, in characters.
MAX_SHOWN = 80


@dataclass(frozen=True)
class Place:
    """A process's position in its group; always ``0 <= rank < world_size``."""

    rank: int
    world_size: int

    def __str__(self) -> str:
        """Returns the words used in messages: ``rank 1 of 4``."""
        return f"rank {self.rank} of {self.world_size}"


def value(environ: Mapping[str, str], name: str) -> str | None:
    """Returns the variable without surrounding blanks, or None if it is unset or blank."""
    return environ.get(name, "").strip() or None


def shown(found: object) -> str:
    """Returns ``found`` as a message repeats it, shortened."""
    try:
        text = repr(found)
    except ValueError:
        # Python refuses to print numbers of thousands of digits.
        return f"a number of more than {MAX_SHOWN} digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def integer(given: Any, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Returns ``given`` as an int; ``name`` is its source, for messages.

    Raises:
        ConfigError: ``given`` is not a whole number from ``minimum`` to ``maximum``.
    """
    try:
        number = operator.index(given)
    except TypeError:
        number = minimum - 1
    if isinstance(given, bool) or number < minimum or (maximum is not None and number > maximum):
        wanted = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigError(f"{name}={shown(given)} is not a whole number {wanted}; correct it")
    return number


def seconds(given: Any, name: str) -> float:
    """Returns ``given`` as a number of seconds, which may be infinite.

    Raises:
        ConfigError: ``given`` is not a number above 0.
    """
    try:
        number = float(given) if isinstance(given, numbers.Real) else math.nan
    except OverflowError:
        number = math.nan
    if not number > 0:
        raise ConfigError(f"{name}={shown(given)} is not a number of seconds above 0; correct it")
    return number


def is_numeral(text: str) -> bool:
    """Returns whether text has no ``_`` and no digits of other scripts, which Python accepts."""
    return text.isascii() and "_" not in text


def is_digits(text: str) -> bool:
    """Returns whether text consists of the digits 0 to 9."""
    return text.isascii() and text.isdigit()


def whole_number(text: str, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
    """Returns the whole number in ``text``; raises ConfigError as `integer` does."""
    plausible = is_digits(text) and len(text) <= MAX_DIGITS
    return integer(int(text) if plausible else text, name, minimum=minimum, maximum=maximum)


def place(environ: Mapping[str, str], rank_name: str, size_name: str) -> Place | None:
    """Returns the place that a pair of variables claims, or None if neither is set.

    Raises:
        ConfigError: One of the two is missing, or they contradict each other.
    """
    rank_text, size_text = value(environ, rank_name), value(environ, size_name)
    if rank_text is None and size_text is None:
        return None
    if rank_text is None or size_text is None:
        missing, present = (rank_name, size_name) if rank_text is None else (size_name, rank_name)
        raise ConfigError(
            f"{present} is set but {missing} is not; set {missing}, or unset {present}"
        )
    return checked_place(
        whole_number(rank_text, rank_name),
        whole_number(size_text, size_name, minimum=1, maximum=MAX_WORLD_SIZE),
        f"{rank_name}={rank_text}",
        f"{size_name}={size_text}",
    )


def argument_place(rank: object, world_size: object) -> Place:
    """Returns the place that the arguments ``rank`` and ``world_size`` claim.

    Raises:
        ConfigError: An argument is not a valid number, or they contradict each other.
    """
    return checked_place(
        integer(rank, "rank"),
        integer(world_size, "world_size", minimum=1, maximum=MAX_WORLD_SIZE),
        f"rank={shown(rank)}",
        f"world_size={world_size}",
    )


def checked_place(rank: int, world_size: int, rank_words: str, size_words: str) -> Place:
    """Returns the place of a rank after checking that the rank is below the world size.

    Raises:
        ConfigError: The rank does not exist in a world of that size.
    """
    if rank >= world_size:
        raise ConfigError(
            f"{rank_words} is too large for {size_words}: ranks run from 0 to {world_size - 1}"
        )
    return Place(rank, world_size)


def address(text: object, name: str) -> str:
    """Returns ``text`` if it is ``host:port`` or ``[ipv6]:port``; ``name`` is its source.

    Raises:
        ConfigError: ``text`` has no host, no port, or a port outside 1 to 65535.
    """
    host, colon, port = text.strip().rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    named = host not in ("", "[]") and _is_name(host)
    if not (colon and named and (bracketed or ":" not in host)):
        raise ConfigError(f"{name}={shown(text)} is not host:port (or [ipv6]:port); correct it")
    plausible = is_digits(port) and len(port) <= MAX_DIGITS
    if not plausible or not 1 <= int(port) <= MAX_PORT:
        raise ConfigError(f"{name}={shown(text)} has no port between 1 and {MAX_PORT}; correct it")
    return f"{host}:{int(port)}"


def _is_name(host: str) -> bool:
    """Returns whether a resolver accepts the name: IDNA, in parts of at most 63 bytes."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return not any(character in " /\0" for character in host)


def ports(given: object, name: str) -> tuple[int, int]:
    """Returns the first and last port of a range such as ``29500-29515``, or of one port.

    Raises:
        ConfigError: ``given`` is not a port or a range of ports from 1 to 65535.
    """
    first, dash, last = given.partition("-") if isinstance(given, str) else (given, "", "")
    try:
        low, high = (
            whole_number(text.strip(), name, minimum=1, maximum=MAX_PORT)
            if isinstance(text, str)
            else integer(text, name, minimum=1, maximum=MAX_PORT)
            for text in (first, last if dash else first)
        )
    except ConfigError:
        low, high = 1, 0
    if low > high:
        raise ConfigError(
            f"{name}={shown(given)} is neither a port from 1 to {MAX_PORT} nor a range of them "
            "such as 29500-29515; correct it"
        )
    return low, high


def first_port(environ: Mapping[str, str], otherwise: int) -> int:
    """Returns the first port of ``GRADRING_PORT``, or ``otherwise`` if that is unset."""
    text = value(environ, PORT)
    return otherwise if text is None else ports(text, PORT)[0]


def at_first_port(environ: Mapping[str, str], address: str) -> str:
    """Returns ``address`` with the first port of ``GRADRING_PORT``, if that is set."""
    host, _, port = address.rpartition(":")
    return f"{host}:{first_port(environ, int(port))}"


def joined_address(host: str, port: int) -> str:
    """Returns ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def given_rendezvous(environ: Mapping[str, str]) -> str | None:
    """Returns ``GRADRING_RENDEZVOUS``, which replaces the rendezvous of any detected cluster.

    Raises:
        ConfigError: The variable is set, but is not ``host:port``.
    """
    text = value(environ, RENDEZVOUS)
    return None if text is None else address(text, RENDEZVOUS)


def given_job_id(environ: Mapping[str, str]) -> str | None:
    """Returns ``GRADRING_JOB_ID`` or None; ``gradring run`` makes a new one for each start."""
    return value(environ, JOB_ID)


def job_id(text: object) -> str:
    """Returns the name of a job; a long one is shortened, with a hash that keeps it unique.

    Raises:
        ConfigError: ``text`` is not a string, or is blank.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"job_id={shown(text)} is no name of a job; give text, or None")
    encoded = text.strip().encode(errors="backslashreplace")
    if len(encoded) > MAX_JOB_ID:
        import hashlib  # costs 3 ms, and most names are short

        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        encoded = encoded[: MAX_JOB_ID - len(digest) - 1] + b"~" + digest.encode()
    return encoded.decode(errors="replace")


def master_rendezvous(environ: Mapping[str, str], prefix: str = "") -> str | None:
    """Returns ``MASTER_ADDR:MASTER_PORT``, with a prefix to both names; None if both are unset.

    Raises:
        ConfigError: One of the two is missing or malformed.
    """
    host_name, port_name = f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT"
    host, port = value(environ, host_name), value(environ, port_name)
    if host is None and port is None:
        return None
    if host is None or port is None:
        missing, present = (host_name, port_name) if host is None else (port_name, host_name)
        raise ConfigError(f"{present} is set but {missing} is not; set {missing} as well")
    number = whole_number(port, port_name, minimum=1)
    return address(joined_address(host, number), f"{host_name}:{port_name}")


def is_loopback(address: str) -> bool:
    """Returns whether only processes of this machine reach this ``host:port``.

    The answer is about the configured address. A socket may be bound to another address, so a group
    asks its ranks for theirs (``reachable_from_other_hosts``).
    """
    import ipaddress  # costs 10 ms, and most groups have a token

    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
