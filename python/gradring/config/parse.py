"""Text from outside becomes checked values here, once: addresses, ports, numbers, names, ranks."""

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
#: Where the ranks of a running job may be, for a process that is to join them.
JOIN = "GRADRING_JOIN"
#: By which such a process hears from `gradring run` that the job has ended well without it. Where
#: nobody waits for this signal, the system drops it.
JOB_HAS_ENDED = signal.SIGURG
#: Of rank 0, where a launcher tells its host only; that of torch and Kubeflow, too.
DEFAULT_PORT = 29500
MAX_PORT = 65535
MAX_DIGITS = 18
#: A number beyond it is a slip: rank 0 could not hold that many connections.
MAX_WORLD_SIZE = 2048
#: Bytes of a job's name that travel: every rank gets that of every other.
MAX_JOB_ID = 64
#: Characters of a wrong value that a message repeats.
MAX_SHOWN = 80


@dataclass(frozen=True)
class Place:
    """A process's position in its group; always ``0 <= rank < world_size``."""

    rank: int
    world_size: int

    def __str__(self) -> str:
        """The words used in messages: ``rank 1 of 4``."""
        return f"rank {self.rank} of {self.world_size}"


def value(environ: Mapping[str, str], name: str) -> str | None:
    """The variable without surrounding blanks; None when it is unset or blank."""
    return environ.get(name, "").strip() or None


def shown(found: object) -> str:
    """``found`` as a message repeats it, shortened."""
    try:
        text = repr(found)
    except ValueError:
        # Python refuses to print numbers of thousands of digits.
        return f"a number of more than {MAX_SHOWN} digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def integer(given: Any, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
    """``given`` when it is an int or numpy's; ``name`` says where it was found.

    Raises:
        ConfigError: It is not a whole number of at least ``minimum`` and at most ``maximum``.
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
    """``given`` when it is a number of seconds, perhaps infinitely many.

    Raises:
        ConfigError: It is not a number above 0.
    """
    try:
        number = float(given) if isinstance(given, numbers.Real) else math.nan
    except OverflowError:
        number = math.nan
    if not number > 0:
        raise ConfigError(f"{name}={shown(given)} is not a number of seconds above 0; correct it")
    return number


def is_numeral(text: str) -> bool:
    """Whether it has the characters of numbers: Python reads ``1_0`` and other scripts' digits."""
    return text.isascii() and "_" not in text


def is_digits(text: str) -> bool:
    """Whether it is digits from 0 to 9 alone."""
    return text.isascii() and text.isdigit()


def whole_number(text: str, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
    """The number that ``text`` spells; otherwise as `integer`."""
    plausible = is_digits(text) and len(text) <= MAX_DIGITS
    return integer(int(text) if plausible else text, name, minimum=minimum, maximum=maximum)


def place(environ: Mapping[str, str], rank_name: str, size_name: str) -> Place | None:
    """The place that a pair of variables claims; None when neither is set.

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
    """The place in the arguments ``rank`` and ``world_size``.

    Raises:
        ConfigError: One of them is no such number, or they contradict each other.
    """
    return checked_place(
        integer(rank, "rank"),
        integer(world_size, "world_size", minimum=1, maximum=MAX_WORLD_SIZE),
        f"rank={shown(rank)}",
        f"world_size={world_size}",
    )


def checked_place(rank: int, world_size: int, rank_words: str, size_words: str) -> Place:
    """The place, once the rank is known to be below the world size.

    Raises:
        ConfigError: The rank does not exist in a world of that size.
    """
    if rank >= world_size:
        raise ConfigError(
            f"{rank_words} is too large for {size_words}: ranks run from 0 to {world_size - 1}"
        )
    return Place(rank, world_size)


def address(text: object, name: str) -> str:
    """``text`` when it is ``host:port`` or ``[ipv6]:port``; ``name`` says where it was found.

    Raises:
        ConfigError: It has no host, no port, or a port outside 1 to 65535.
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
    """Whether the system can be asked for it, which is in bytes and by parts of at most 63."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return not any(character in " /\0" for character in host)


def ports(given: object, name: str) -> tuple[int, int]:
    """The first and the last of a range such as ``29500-29515``, or of one port.

    Raises:
        ConfigError: It is no such range, or not within 1 to 65535.
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
    """The port of rank 0, where the launcher tells none: the first of ``GRADRING_PORT``."""
    text = value(environ, PORT)
    return otherwise if text is None else ports(text, PORT)[0]


def at_first_port(environ: Mapping[str, str], address: str) -> str:
    """``address`` of rank 0, at the first of ``GRADRING_PORT`` if that is set."""
    host, _, port = address.rpartition(":")
    return f"{host}:{first_port(environ, int(port))}"


def joined_address(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def given_rendezvous(environ: Mapping[str, str]) -> str | None:
    """``GRADRING_RENDEZVOUS``: alone, it moves the rendezvous of whichever environment is found.

    Raises:
        ConfigError: It is set but is not ``host:port``.
    """
    text = value(environ, RENDEZVOUS)
    return None if text is None else address(text, RENDEZVOUS)


def given_job_id(environ: Mapping[str, str]) -> str | None:
    """``GRADRING_JOB_ID``, which ``gradring run`` makes anew for each start; None when unset."""
    return value(environ, JOB_ID)


def job_id(text: object) -> str:
    """``text`` when it is the name of a job; a long one is shortened, and stays different.

    Raises:
        ConfigError: It is no text, or blank.
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
    """``MASTER_ADDR:MASTER_PORT``, with a prefix to their names; None when neither is set.

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
    """Whether nobody reaches this ``host:port`` but processes of this machine.

    It is what a configuration says. A socket may be bound elsewhere: a group asks those of its
    ranks (``reachable_from_other_hosts``).
    """
    import ipaddress  # costs 10 ms, and most groups have a token

    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
