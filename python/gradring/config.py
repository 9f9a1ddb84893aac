"""Settings that are no part of the cluster: an argument beats a variable, a variable a default."""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradring.clusters import parse
from gradring.errors import ConfigError

TRANSPORTS = ("auto", "tcp", "shm")
WIRE_DTYPES = ("bfloat16", "float16")
STREAMS = tuple(range(1, 17))
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_PROMETHEUS_ADDRESS = "127.0.0.1"
TLS_VARIABLES = ("GRADRING_TLS_CA", "GRADRING_TLS_CERT", "GRADRING_TLS_KEY")
DEFAULT_STALL_TIMEOUT_S = 1800.0
DEFAULT_STALL_WARNING_S = 30.0
_SECRET_REMEDY = (
    "give its volume defaultMode: 0400, and the pod an fsGroup if its container is not root's"
)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class TlsFiles:
    """PEM files with what a rank needs for TLS.

    Attributes:
        ca: Path of the certificates of the authorities whose certificates are accepted.
        cert: Path of this rank's certificate, followed by those that lead to an authority. It must
            be for the name or address at which others reach this rank, and serve for servers and
            clients.
        key: Path of its private key, which nobody else may read.
    """

    ca: str
    cert: str
    key: str


@dataclass(frozen=True)
class Settings:
    """How a rank talks to the others.

    Attributes:
        token: The job's shared secret, or None for no authentication. Never printed.
        require_auth: Refuse to join a group of several ranks without a token.
        tls: Certificates, or None for no TLS.
        interface: IP address at which to listen, or None for what the cluster says.
        ports: First and last of the ports at which to listen, or None for what the cluster says, or
            any.
        transport: ``auto`` (shared memory inside a host, sockets between hosts), ``tcp`` or
            ``shm``.
        timeout: Bound in seconds on forming the group.
        streams: TCP connections with each peer, 1 to 16.
        checksum: Whether all bytes of collectives are protected by checksums.
        algorithm: Of all-reduces, for all sizes or by size.
        reproducible: Whether every sum is the left fold in rank order.
        wire_dtype: To what float32 is rounded for travelling; None: it is not.
        stall_timeout: Seconds of standstill after which a collective fails although all ranks live.
        stall_warning: Seconds of standstill in a collective after which a first warning is logged.
        flight_dir: Where each rank writes its last collectives when the group fails, and on
            SIGUSR2; None for nowhere.
        trace: The file of a timeline of all ranks; None for no timeline.
        log_dir: Where rank 0 writes the numbers of its `Monitor`; None for nowhere.
        prometheus_port: At which local rank 0 serves its metrics, local rank 1 at the next, and so
            on; None for no metrics.
        prometheus_address: IP address at which it does so.
        log_level: Of the logger ``gradring``; None to leave it as it is.
    """

    token: bytes | None = field(default=None, repr=False)
    require_auth: bool = False
    transport: str = "auto"
    timeout: float = DEFAULT_TIMEOUT_S
    streams: int = 1
    stall_timeout: float = DEFAULT_STALL_TIMEOUT_S
    stall_warning: float = DEFAULT_STALL_WARNING_S
    flight_dir: Path | None = None
    trace: Path | None = None
    tls: TlsFiles | None = None
    interface: str | None = None
    log_dir: Path | None = None
    prometheus_port: int | None = None
    prometheus_address: str = DEFAULT_PROMETHEUS_ADDRESS
    checksum: bool = False
    log_level: int | None = None
    ports: tuple[int, int] | None = None
    algorithm: str = "auto"
    reproducible: bool = False
    wire_dtype: str | None = None

    @classmethod
    def from_environ(
        cls,
        environ: Mapping[str, str] = os.environ,
        *,
        token: bytes | str | None = None,
        require_auth: bool | None = None,
        transport: str | None = None,
        timeout: float | None = None,
        streams: int | None = None,
        checksum: bool | None = None,
        algorithm: str | None = None,
        reproducible: bool | None = None,
        wire_dtype: str | None = None,
        tls: TlsFiles | None = None,
        interface: str | None = None,
        port: int | str | None = None,
        stall_timeout: float | None = None,
        stall_warning: float | None = None,
    ) -> Settings:
        """Reads the ``GRADRING_*`` settings; an argument that is not None wins over its variable.

        Args:
            environ: The variables to read: ``GRADRING_TOKEN`` or ``GRADRING_TOKEN_FILE``,
                ``GRADRING_REQUIRE_AUTH``, ``GRADRING_TRANSPORT``, ``GRADRING_TIMEOUT_S``,
                ``GRADRING_STREAMS``, ``GRADRING_CHECKSUM``, ``GRADRING_ALGORITHM``,
                ``GRADRING_REPRODUCIBLE``, ``GRADRING_WIRE_DTYPE``, ``GRADRING_STALL_TIMEOUT_S``,
                ``GRADRING_STALL_WARNING_S``, ``GRADRING_FLIGHT_DIR``, ``GRADRING_TRACE``,
                ``GRADRING_LOG_DIR``, ``GRADRING_PROMETHEUS_PORT``, ``GRADRING_PROMETHEUS_ADDRESS``,
                ``GRADRING_LOG``, ``GRADRING_TLS_CA``, ``GRADRING_TLS_CERT`` and
                ``GRADRING_TLS_KEY``, ``GRADRING_INTERFACE``, ``GRADRING_PORT``.
            token: Shared secret; a string is encoded as UTF-8.
            require_auth: Whether a token is obligatory.
            transport: ``auto``, ``tcp`` or ``shm``.
            timeout: In seconds, finite and above zero.
            streams: TCP connections with each peer, 1 to 16.
            checksum: Whether all bytes of collectives are protected by checksums.
            algorithm: Such as ``direct:1MiB,ring``.
            reproducible: Whether every sum is the left fold in rank order.
            wire_dtype: ``bfloat16`` or ``float16``.
            tls: Certificates for TLS.
            interface: Name or IP address of a network interface.
            port: A port, or a range such as ``29500-29515``.
            stall_timeout: As ``timeout``.
            stall_warning: As ``timeout``.

        Raises:
            ConfigError: A value cannot be used; the message names the variable or argument.
        """
        return cls(
            token=_token(environ, token),
            require_auth=_flag(environ, "GRADRING_REQUIRE_AUTH", require_auth),
            transport=_one_of(environ, "GRADRING_TRANSPORT", transport, TRANSPORTS) or "auto",
            timeout=_seconds(environ, "timeout", "GRADRING_TIMEOUT_S", timeout, DEFAULT_TIMEOUT_S),
            stall_timeout=_seconds(
                environ,
                "stall_timeout",
                "GRADRING_STALL_TIMEOUT_S",
                stall_timeout,
                DEFAULT_STALL_TIMEOUT_S,
            ),
            stall_warning=_seconds(
                environ,
                "stall_warning",
                "GRADRING_STALL_WARNING_S",
                stall_warning,
                DEFAULT_STALL_WARNING_S,
            ),
            streams=_streams(environ, streams),
            checksum=_flag(environ, "GRADRING_CHECKSUM", checksum),
            algorithm=_algorithm(environ, algorithm),
            reproducible=_flag(environ, "GRADRING_REPRODUCIBLE", reproducible),
            wire_dtype=_one_of(environ, "GRADRING_WIRE_DTYPE", wire_dtype, WIRE_DTYPES),
            flight_dir=_path(environ, "GRADRING_FLIGHT_DIR"),
            trace=_path(environ, "GRADRING_TRACE"),
            tls=_tls(environ, tls),
            interface=_interface(environ, interface, "GRADRING_INTERFACE"),
            ports=_ports(environ, port),
            log_dir=_path(environ, "GRADRING_LOG_DIR"),
            prometheus_port=_port(environ, "GRADRING_PROMETHEUS_PORT"),
            prometheus_address=_interface(environ, None, "GRADRING_PROMETHEUS_ADDRESS")
            or DEFAULT_PROMETHEUS_ADDRESS,
            log_level=_log_level(environ, "GRADRING_LOG"),
        )


def check_token(rank: int, world_size: int, token: bytes | None, required: bool | None) -> None:
    """Refuses to join a group without a token where one is required.

    Args:
        rank: For the message.
        world_size: A world of one needs no token.
        token: The job's secret, if there is one.
        required: Whether there must be one; None: what ``GRADRING_REQUIRE_AUTH`` says.

    Raises:
        ConfigError: A token is required and there is none.
    """
    if world_size > 1 and not token and _flag(os.environ, "GRADRING_REQUIRE_AUTH", required):
        raise ConfigError(
            f"GRADRING_REQUIRE_AUTH asks for authentication, but rank {rank} has no token; "
            "give every rank the same GRADRING_TOKEN or GRADRING_TOKEN_FILE"
        )


def _token(environ: Mapping[str, str], given: bytes | str | None) -> bytes | None:
    if given is not None:
        return _token_from_argument(given)
    text, path = environ.get("GRADRING_TOKEN"), environ.get("GRADRING_TOKEN_FILE")
    if text and path:
        raise ConfigError("GRADRING_TOKEN and GRADRING_TOKEN_FILE are both set; unset one of them")
    if path:
        return _token_from_file(Path(path))
    return os.fsencode(text) if text else None


def _token_from_argument(given: object) -> bytes:
    if not isinstance(given, str | bytes):
        kind = type(given).__name__
        raise ConfigError(f"token is of type {kind}; give str, bytes, or None for no token")
    try:
        token = given.encode() if isinstance(given, str) else given
    except UnicodeEncodeError:
        # Its message would repeat a part of the secret.
        raise ConfigError("token cannot be encoded as UTF-8; give it as bytes") from None
    if not token:
        raise ConfigError("token is empty; give a secret, or None for no authentication")
    return token


def _token_from_file(path: Path) -> bytes:
    _check_private(path, "GRADRING_TOKEN_FILE")
    try:
        token = path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(
            f"GRADRING_TOKEN_FILE={str(path)!r} cannot be read ({error.strerror}); "
            "correct the path or its permissions"
        ) from error
    if not token:
        raise ConfigError(f"GRADRING_TOKEN_FILE={str(path)!r} is empty; write a secret into it")
    return token


def _check_private(path: Path, name: str) -> None:
    """Refuses a secret that every user of the machine can read or replace."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # whoever reads it says so
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        # Kubernetes mounts a Secret by this link, and read-only.
        is_secret = (path.parent / "..data").is_symlink()
        remedy = _SECRET_REMEDY if is_secret else f"type: chmod 600 {path}"
        raise ConfigError(
            f"{name}={str(path)!r} can be read or written by every user (mode {mode & 0o777:o}); "
            f"{remedy}"
        )


def _tls(environ: Mapping[str, str], given: TlsFiles | None) -> TlsFiles | None:
    if given is None:
        paths = {name: environ.get(name, "").strip() for name in TLS_VARIABLES}
        missing = [name for name, path in paths.items() if not path]
        if len(missing) == len(paths):
            return None
        if missing:
            present = [name for name in paths if name not in missing]
            raise ConfigError(
                f"{' and '.join(present)} set but {' and '.join(missing)} not; "
                "set all three for TLS, or none"
            )
        given = TlsFiles(*paths.values())
    elif not isinstance(given, TlsFiles):
        raise ConfigError(f"tls={parse.shown(given)} is not a gradring.config.TlsFiles; give one")
    _check_private(Path(given.key), TLS_VARIABLES[-1])
    return given


def _interface(environ: Mapping[str, str], given: str | None, variable: str) -> str | None:
    name = "interface" if given is not None else variable
    text = given if given is not None else environ.get(name, "").strip()
    if not text:
        return None
    from gradring.interfaces import address_of  # most groups need none

    return address_of(text, name)


def _ports(environ: Mapping[str, str], given: object) -> tuple[int, int] | None:
    return parse.given_ports(environ) if given is None else parse.ports(given, "port")


def _flag(environ: Mapping[str, str], variable: str, given: bool | None) -> bool:
    if given is not None:
        if given not in (False, True):
            raise ConfigError(
                f"{_argument(variable)}={parse.shown(given)} is neither True nor False; correct it"
            )
        return bool(given)
    text = environ.get(variable, "").strip()
    if text.lower() in _TRUE:
        return True
    if not text or text.lower() in _FALSE:
        return False
    raise ConfigError(f"{variable}={parse.shown(text)} is neither 1 nor 0; correct it")


def _one_of(
    environ: Mapping[str, str], variable: str, given: str | None, known: tuple[str, ...]
) -> str | None:
    name = _argument(variable) if given is not None else variable
    text = given if given is not None else environ.get(name, "").strip()
    if given is None and not text:
        return None
    if text not in known:
        words = ", ".join(known)
        raise ConfigError(f"{name}={parse.shown(text)} is not one of {words}; correct it")
    return text


def _algorithm(environ: Mapping[str, str], given: str | None) -> str:
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"algorithm={given!r} is no text; give such as 'direct:1MiB,ring'")
    return given if given is not None else environ.get("GRADRING_ALGORITHM", "").strip() or "auto"


def _argument(variable: str) -> str:
    """The argument that says what a variable says."""
    return variable.removeprefix("GRADRING_").lower()


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name, "").strip()
    # A program may change its directory before the path is used.
    return Path(text).absolute() if text else None


def _port(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    return parse.whole_number(text, name, minimum=1, maximum=parse.MAX_PORT)


def _log_level(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    level = int(text) if text.isdecimal() else logging.getLevelName(text.upper())
    if isinstance(level, int):
        return level
    raise ConfigError(
        f"{name}={text!r} is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL, nor a number; "
        "correct it"
    )


def _seconds(
    environ: Mapping[str, str], argument: str, variable: str, given: float | None, default: float
) -> float:
    name = argument if given is not None else variable
    text = given if given is not None else environ.get(name, "").strip() or default
    try:
        seconds = float(text)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        wrong = parse.shown(text)
        raise ConfigError(f"{name}={wrong} is not a number of seconds above 0; correct it")
    return seconds


def _streams(environ: Mapping[str, str], given: int | None) -> int:
    least, most = STREAMS[0], STREAMS[-1]
    if given is not None:
        return parse.integer(given, "streams", minimum=least, maximum=most)
    name = "GRADRING_STREAMS"
    text = parse.value(environ, name) or "1"
    return parse.whole_number(text, name, minimum=least, maximum=most)
