"""Arguments of several commands."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gradring.errors import ConfigError

T = TypeVar("T")
#: Prints a line at once.
say = partial(print, flush=True)


def option(
    parser: argparse._ActionsContainer,
    head: str,
    parse: Callable[[str], object] = str,
    **more: Any,
) -> Callable[[str], object]:
    """Declares an option, of which the text for ``--help`` follows.

    Args:
        parser: Whose.
        head: Its names, and what follows them, such as ``-np -n N``; what nothing follows and has
            no ``choices`` is a switch.
        parse: Reads what follows.
        more: As of `argparse.ArgumentParser.add_argument`.

    Returns:
        What takes the text.
    """
    names = [word for word in head.split() if word.startswith("-")]
    if metavar := " ".join(head.split()[len(names) :]):
        more |= {"type": parse, "metavar": metavar}
    elif "choices" not in more:
        more["action"] = "store_true"
    return lambda text: parser.add_argument(*names, help=text, **more)


def seconds(text: str) -> float:
    """A finite number of at least 0; as the type of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return number


def count(what: str, *, least: int = 1) -> Callable[[str], int]:
    """The type of an argument that is a number of ``what``."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a number of {what} of at least {least}")
        return int(text)

    return usage(parsed)


def usage(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The type of an argument that ``parse`` reads: argparse shows the text of its `ValueError`."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def make_directory(option: str, directory: Path) -> None:
    """Makes a directory for results, before there are any.

    Raises:
        ConfigError: It cannot be made; names the option.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{option} {directory}: this is a file; name a directory") from None
    except OSError as error:
        raise ConfigError(
            f"{option} {directory}: this directory cannot be made ({error.strerror}); name another"
        ) from None


def check_file(option: str, file: Path) -> None:
    """Checks that a file for results can be written, before there are any; makes its directory.

    Raises:
        ConfigError: It cannot be written; names the option.
    """
    if file.is_dir():
        raise ConfigError(f"{option} {file}: this is a directory; name a file in it")
    new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"{option} {file}: this file cannot be written ({error.filename}: {error.strerror}); "
            "name another"
        ) from None
    if new:
        file.unlink()
