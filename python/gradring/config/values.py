"""Values of settings: an argument beats a variable, and a variable beats the default."""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gradring import _native
from gradring.config import parse
from gradring.config.settings import READ, Setting, variables
from gradring.config.words import did_you_mean, meant
from gradring.errors import ConfigError
from gradring.machine import versions

if TYPE_CHECKING:
    from gradring._native import SettingValues

#: Arguments of `gradring.init` that are no settings.
_OF_PLACE = ("rank", "world_size", "rendezvous", "listen", "announce")
#: Choices of the settings of these names; `READ` has the same.
Transport: TypeAlias = Literal["auto", "tcp", "shm"]
WireDtype: TypeAlias = Literal["bfloat16", "float16"]
TLS_VARIABLES = tuple(variables("tls"))
_SECRET_REMEDY = (
    "give its volume defaultMode: 0400, and the pod an fsGroup if its container is not root's"
)
#: Limits of names and paths, in bytes. Linux allows 255 and 4095; the difference is for files that
#: ranks create, such as ``FILE.parts/group-2/rank-0.json``.
MAX_NAME_BYTES, MAX_PATH_BYTES = 240, 4000
#: First address of a job that a process joins or, if it does not run yet, founds.
AUTO = "auto"
#: Kinds of settings whose values only the host of a rank can judge.
_OF_A_HOST = ("name or IP", "secret", "file", "PEM file")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class TlsFiles:
    """PEM files with what a rank needs for TLS.

    Attributes:
        ca: Path of the certificates of accepted authorities.
        cert: Path of this rank's certificate, followed by those that lead to an authority. It must
            be valid for the name or address at which others reach this rank, for servers and for
            clients.
        key: Path of the private key, which nobody else may read.

    Examples:
        >>> files = gradring.TlsFiles(ca="ca.pem", cert="rank.pem", key="rank.key")
        >>> gradring.Communicator(rank, 2, "node-a:29500", tls=files)
        Traceback (most recent call last):
            ...
        gradring.errors.ConfigError: tls.ca (GRADRING_TLS_CA): ca.pem cannot be read as PEM: I/O
        error: No such file or directory ...; correct the setting and start again
    """

    ca: str
    cert: str
    key: str


def check_token(rank: int, world_size: int, token: bytes | None, required: bool | None) -> None:
    """Checks that a rank has a token where one is required.

    Args:
        rank: This rank, for the message.
        world_size: World size; a single rank needs no token.
        token: The job's secret, if there is one.
        required: Whether a token is required; None for the value of ``GRADRING_REQUIRE_AUTH``.

    Raises:
        ConfigError: A token is required and there is none.
    """
    if world_size > 1 and not token and _read(os.environ, READ["require_auth"], required):
        raise ConfigError(
            f"require_auth (GRADRING_REQUIRE_AUTH) asks for authentication, but rank {rank} has "
            "no token; give every rank the same token (GRADRING_TOKEN or GRADRING_TOKEN_FILE)"
        )


def check_variables(environ: Mapping[str, str], *, is_own: bool) -> None:
    """Checks the values of variables before any rank starts with them.

    Args:
        environ: The variables.
        is_own: Whether one of the ranks runs on this host. Otherwise settings of files and
            interfaces are not checked, because other hosts may have other ones.

    Raises:
        ConfigError: A value cannot be used; the message names its variable.
    """
    for setting in READ.values():
        if is_own or setting.kind not in _OF_A_HOST:
            _read(environ, setting)


def _read(environ: Mapping[str, str], setting: Setting, given: object = None) -> Any:
    """Returns the value of a setting from its argument, its variable, or its default.

    Raises:
        ConfigError: The value cannot be used; the message names the argument or the variable.
    """
    by_name = {"token": _token, "tls": _tls}.get(setting.name)
    if by_name is not None:
        return by_name(environ, given)
    if given is not None:
        try:
            return _READERS[setting.kind](setting.name, given, setting)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:  # for example an array, which has no truth value
            wrong = parse.shown(given)
            raise ConfigError(f"{setting.name}={wrong} is no value for it; correct it") from error
    said = environ.get(setting.variable, "").strip()
    text = said or setting.default
    found = _READERS[setting.kind](setting.variable, text, setting) if text else None
    if said and setting.reader == "Group":
        _check_by_core(setting, found)
    return found


def _check_by_core(setting: Setting, found: object) -> None:
    """Checks a variable's value by the core, whose message names the argument instead."""
    try:
        replace(DEFAULTS, **{setting.name: found}).for_core()
    except ConfigError as error:
        raise ConfigError(f"{setting.variable}{str(error).removeprefix(setting.name)}") from None


def _flag(name: str, found: object, setting: Setting) -> bool:
    if name == setting.variable:
        word = str(found).lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ConfigError(f"{name}={parse.shown(found)} is neither 1 nor 0; correct it")
    if found not in (False, True):
        raise ConfigError(f"{name}={parse.shown(found)} is neither True nor False; correct it")
    return bool(found)


def _one_of(name: str, found: object, setting: Setting) -> str:
    if not isinstance(found, str) or found not in setting.choices:
        words = ", ".join(setting.choices)
        raise ConfigError(f"{name}={parse.shown(found)} is not one of {words}; correct it")
    return found


def _number(name: str, found: Any, setting: Setting) -> int:
    least, most = map(int, setting.choices or (1, parse.MAX_PORT))
    read = parse.whole_number if name == setting.variable else parse.integer
    return read(found, name, minimum=least, maximum=most)


def _seconds(name: str, found: Any, setting: Setting) -> float:
    try:
        is_numeral = not isinstance(found, str) or parse.is_numeral(found)
        seconds = float(found) if is_numeral else math.nan
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        wrong = parse.shown(found)
        raise ConfigError(f"{name}={wrong} is not a number of seconds above 0; correct it")
    return seconds


def _text(name: str, found: object, setting: Setting) -> str:
    if not isinstance(found, str) or not found.isascii():
        raise ConfigError(
            f"{name}={parse.shown(found)} is no text; give {setting.kind} {setting.meaning}"
        )
    return found


def _path(name: str, found: Any, setting: Setting) -> Path:
    # A program may change its directory before the path is used.
    path = Path(found).absolute()
    if setting.kind == "file" and not path.name:
        raise ConfigError(f"{name}={parse.shown(found)} names no file; correct it")
    check_path(name, path)
    return path


def check_path(name: str, path: Path) -> None:
    """Checks that the system accepts this path, and those of records in it or beside it.

    Raises:
        gradring.errors.ConfigError: The path is too long, or has characters that no path can have.
    """
    wrong = f"{name}={parse.shown(str(path))}"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise ConfigError(f"{wrong} has characters that no path can have; correct it")
    longest, whole = max(map(len, encoded.split(b"/"))), len(encoded)
    if longest > MAX_NAME_BYTES or whole > MAX_PATH_BYTES:
        raise ConfigError(
            f"{wrong} is too long: the path has {whole} bytes and its longest name {longest}, and "
            f"{MAX_PATH_BYTES} and {MAX_NAME_BYTES} leave room for the files; give a shorter one"
        )


def _addresses(name: str, found: object, setting: Setting) -> tuple[str, ...]:
    given = found.split(",") if isinstance(found, str) else found
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(
            f"{name}={parse.shown(found)} is neither {AUTO} nor host:port of members of a running "
            "job; correct it"
        )
    first = AUTO if given[0] == AUTO else parse.address(given[0], name)
    return (first, *(parse.address(each, name) for each in given[1:]))


def _interface(name: str, found: Any, setting: Setting) -> str | None:
    if found in ("", setting.default):
        return found or None
    from gradring.machine.interfaces import address_of  # most groups need none

    return address_of(found, name)


def _level(name: str, found: Any, setting: Setting) -> int:
    text = str(found)
    plausible = parse.is_digits(text) and len(text) <= parse.MAX_DIGITS
    level = int(text) if plausible else logging.getLevelName(text.upper())
    if isinstance(level, int):
        return level
    raise ConfigError(
        f"{name}={parse.shown(found)} is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL, nor a "
        "number; correct it"
    )


#: Functions that read values, by kind. Their arguments are the name to blame, the value found, and
#: the row of the table.
_READERS: dict[str, Callable[[str, Any, Setting], Any]] = {
    "0 or 1": _flag,
    "`auto` or addresses": _addresses,
    "directory": _path,
    "file": _path,
    "from": _number,
    "level": _level,
    "name or IP": _interface,
    "names": _text,
    "one of": _one_of,
    "port": _number,
    "port or range": lambda name, found, _: parse.ports(found, name),
    "seconds": _seconds,
    "text": _text,
}


def _token(environ: Mapping[str, str], given: object) -> bytes | None:
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
        # Python's message would repeat a part of the secret.
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
        return  # reading fails as well, and reports the reason
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        # Kubernetes mounts a Secret through this link, and read-only.
        is_secret = (path.parent / "..data").is_symlink()
        remedy = _SECRET_REMEDY if is_secret else f"type: chmod 600 {path}"
        raise ConfigError(
            f"{name}={str(path)!r} can be read or written by every user (mode {mode & 0o777:o}); "
            f"{remedy}"
        )


def _tls(environ: Mapping[str, str], given: object) -> TlsFiles | None:
    key_name = "tls.key"
    if given is None:
        key_name = TLS_VARIABLES[-1]
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
    if not isinstance(given, TlsFiles):
        raise ConfigError(f"tls={parse.shown(given)} is not a gradring.TlsFiles; give one")
    for name in ("ca", "cert", "key"):
        check_path(f"tls.{name}", Path(getattr(given, name)))
    _check_private(Path(given.key), key_name)
    return given


if not TYPE_CHECKING:
    SettingValues = make_dataclass(
        "SettingValues",
        [
            (name, Any, field(default=_read({}, setting), repr=name != "token"))
            for name, setting in READ.items()
        ],
        frozen=True,
    )


class Settings(SettingValues):
    """Settings of a rank's group, and of Python beside it.

    The class has a field for each row of the table whose reader is the group or Python.
    """

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ, **given: object) -> Settings:
        """Reads the ``GRADRING_*`` settings; an argument that is not None wins over its variable.

        Args:
            environ: The variables to read.
            given: Arguments by name.

        Raises:
            ConfigError: A value cannot be used; the message names the variable or argument.
            TypeError: There is no such setting.
        """
        for name in given.keys() - READ.keys():
            remedy = did_you_mean(meant(name, (*READ, *_OF_PLACE)))
            raise TypeError(f"{name} is no setting{remedy}")
        return cls(
            **{name: _read(environ, setting, given.get(name)) for name, setting in READ.items()}
        )

    def for_core(
        self, *, listen: str | None = None, announce: str | None = None, job_id: str | None = None
    ) -> _native.Config:
        """Returns the core's configuration, for a group of this process and its successors.

        Args:
            listen: ``host:port`` on which this process listens; None for a free port.
            announce: ``host:port`` at which others reach it; None for the listening address.
            job_id: Name that separates this job from others; None for no name.

        Raises:
            ConfigError: A value cannot be used.
        """
        job = parse.job_id(job_id) if job_id is not None else ""
        loaded = versions.loaded()
        return _native.Config(self, listen=listen, announce=announce, job=job, versions=loaded)


#: Settings without any argument or variable.
DEFAULTS = Settings()
