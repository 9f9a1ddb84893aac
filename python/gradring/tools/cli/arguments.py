"""Command-line parsing shared by all commands."""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from gradring.config.parse import MAX_DIGITS, is_digits, is_numeral, shown
from gradring.config.words import ALIKE, PAGES, did_you_mean, meant
from gradring.errors import ConfigError
from gradring.machine.streams import print_error

T = TypeVar("T")
DOCUMENTATION = f"{PAGES}/command-line.md"
#: Errors of an output without a reader or on a full disk, which `main` handles for all commands.
OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC)
#: Prints a line and flushes it.
say = partial(print, flush=True)


class _Help(argparse.HelpFormatter):
    """A formatter that keeps the lines of an epilogue, and adds missing defaults to texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if not text or "default" in text or default in (None, False, [], (), argparse.SUPPRESS):
            return text
        return f"{text} (default %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser whose help ends with an example, and whose short errors suggest similar names.

    Parsers of sub-commands have this class too.
    """

    def __init__(
        self,
        *,
        example: str = "",
        equivalents: Mapping[str, Sequence[str]] = MappingProxyType({}),
        **more: Any,
    ) -> None:
        """Makes an `argparse.ArgumentParser`.

        Args:
            example: A complete command line.
            equivalents: Equivalent options of other programs, by our option.
            more: Arguments of `argparse.ArgumentParser`.
        """
        ending = f"example:\n  {example}\n\n" if example else ""
        self._equivalents = {its: ours for ours, theirs in equivalents.items() for its in theirs}
        super().__init__(
            epilog=f"{ending}documentation:\n  {DOCUMENTATION}",
            formatter_class=_Help,
            allow_abbrev=False,
            **more,
        )

    @property
    def options(self) -> Collection[str]:
        """The names of all options."""
        return self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """Exits with one line of usage, the problem, and a pointer to the help."""
        usage = self.usage or " ".join([self.prog, "[option...]", *self._positional_names()])
        self.exit(2, f"usage: {usage}\n{self.prog}: error: {message} ({self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exits with a suggestion for the first unknown option."""
        name = unknown[0].partition("=")[0]
        near = meant(name, self._option_string_actions, ALIKE)
        if name in self._equivalents:
            near = self._equivalents[name]
        elif near is not None:
            near = max(self._option_string_actions[near].option_strings, key=len)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(near)}")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores failed writes of help and errors; without this, they would surface at
        # exit.
        if file is sys.stdout:
            file.write(message)
        else:
            print_error(message.removesuffix("\n"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices and isinstance(value, str):
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"there is no {value!r}{did_you_mean(meant(value, known, ALIKE))} "
                f"(choose from {', '.join(known)})",
            )
        super()._check_value(action, value)

    def _positional_names(self) -> list[str]:
        named = (action for action in self._actions if not action.option_strings)
        return [str(action.metavar or action.dest) for action in named]


@dataclass(frozen=True)
class Names:
    """The type of an argument for a list of known names, such as ``tcp,shm``.

    Attributes:
        known: The names.
        kind: Text for a name, with braces in place of the name: ``transport {}``.
    """

    known: Sequence[str]
    kind: str

    def __call__(self, text: str) -> tuple[str, ...]:
        """Parses a list; returns each name once.

        Raises:
            argparse.ArgumentTypeError: A name is unknown; the message has the known names.
        """
        names = [word.strip() for word in text.split(",")]
        for name in names:
            if name not in self.known:
                raise argparse.ArgumentTypeError(
                    f"there is no {self.kind.format(repr(name))}; known: {', '.join(self.known)}"
                )
        return tuple(dict.fromkeys(names))

    def completions(self, prefix: str, **_: object) -> list[str]:
        """Returns what a shell can offer for a list whose last name is incomplete."""
        before, comma, _last = prefix.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in self.known if name not in given]


def option(
    parser: argparse._ActionsContainer,
    head: str,
    parse: Callable[[str], object] = str,
    **more: Any,
) -> Callable[[str], object]:
    """Declares an option; the result takes its text for ``--help``.

    Args:
        parser: The parser.
        head: Names and placeholder of the value, such as ``-np -n N``. An option without a
            placeholder and ``choices`` is a switch.
        parse: Parses the value.
        more: Further arguments of `argparse.ArgumentParser.add_argument`.

    Returns:
        A function that takes the text.
    """
    names = [word for word in head.split() if word.startswith("-")]
    if metavar := " ".join(head.split()[len(names) :]):
        more |= {"type": parse, "metavar": metavar}
    elif "choices" not in more:
        more["action"] = "store_true"

    def declared(text: str) -> argparse.Action:
        action = parser.add_argument(*names, help=text, **more)
        if isinstance(parse, Names):
            # argcomplete reads this attribute.
            action.completer = parse.completions  # type: ignore[attr-defined]
        return action

    return declared


def seconds(text: str) -> float:
    """Parses a finite number of at least 0; used as the type of an argument."""
    try:
        number = float(text) if is_numeral(text) else math.nan
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return number


def count(what: str, *, least: int = 1) -> Callable[[str], int]:
    """Returns the type of an argument for a number of ``what``."""

    def parsed(text: str) -> int:
        if is_digits(text) and len(text) > MAX_DIGITS:
            raise ValueError(f"{shown(text)} {what} are too many")
        if not is_digits(text) or int(text) < least:
            raise ValueError(f"{text!r} is not a number of {what} of at least {least}")
        return int(text)

    return usage(parsed)


def usage(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps ``parse`` as the type of an argument, so that argparse shows its `ValueError`."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def make_directory(option: str, directory: Path) -> None:
    """Makes a directory for results, before any work.

    Raises:
        ConfigError: The directory cannot be made; the message names the option.
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
    """Checks before any work that a file for results is writable; makes its directory.

    Raises:
        ConfigError: The file cannot be written; the message names the option.
    """
    # Unlike methods of a Path, functions of os.path raise no errors.
    if os.path.isdir(file):
        raise ConfigError(f"{option} {file}: this is a directory; name a file in it")
    new = not os.path.exists(file)
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
