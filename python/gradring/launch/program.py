"""The program of the ranks; Python scripts and modules run under gradring's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"(.*/)?python[\d.]*")


@dataclass(frozen=True)
class Program:
    """A command line as the user gave it; each host resolves it for itself.

    Attributes:
        words: A program, a Python script, or a Python module if ``module`` is True; then its
            arguments.
        module: True to run a module, as ``python -m`` does.
    """

    words: Sequence[str]
    module: bool = False

    def command(self, path: str | None) -> list[str]:
        """Returns the command to execute on this machine, with programs searched on ``path``."""
        if self.module:
            return [sys.executable, "-m", *self.words]
        return [sys.executable, *self.words] if self._is_script(path) else list(self.words)

    def problem(self, path: str | None) -> str | None:
        """Returns why this machine cannot start the program, with a remedy; None if it can."""
        name = self.words[0]
        if self.module:
            return None
        if self._is_script(path):
            where = "" if os.path.isabs(name) else f" in {os.getcwd()}"
            return None if os.path.exists(name) else f"there is no file {name!r}{where}"
        if shutil.which(name, path=path) is not None:
            return None
        if _PYTHON.fullmatch(name):
            return f"there is no program {name!r}; type: {self._with_our_python(sys.executable)}"
        if not os.path.isfile(name):
            return f"there is no program {name!r}; check its name and PATH"
        if os.access(name, os.X_OK):  # the file is here, but not on PATH
            return f"there is no program {name!r} on PATH; type ./{name} for the file that is here"
        return f"{name!r} cannot be executed; type: chmod +x {shlex.quote(name)}"

    def advice_without(self, module: str, host: str, python: str) -> str | None:
        """Returns advice for a program that failed because a Python module was not found.

        Args:
            module: The module's name.
            host: The host of the program.
            python: The interpreter with gradring on that host.

        Returns:
            A command to type, if the program ran under another interpreter and gradring's has the
            module; else None.
        """
        name, package = self.words[0], module.partition(".")[0]
        ours = self.module or name == python or Path(name).suffix == ".py"
        if ours or importlib.util.find_spec(package) is None:
            return None
        if _PYTHON.fullmatch(name):
            advice = f"type: {self._with_our_python(python)}"
        else:
            advice = "use that one"
        return (
            f"the Python that {name!r} started on {host} has no {module}; gradring is installed "
            f"for {python}; {advice}"
        )

    def _is_script(self, path: str | None) -> bool:
        """Returns True for a Python script, also one with a ``#!`` line, unless PATH has it."""
        name = self.words[0]
        if self.module or Path(name).suffix != ".py":
            return False
        here = os.sep in name or os.path.exists(name)
        return here or shutil.which(name, path=path) is None

    def _with_our_python(self, python: str) -> str:
        """Returns the same command under an interpreter that has gradring."""
        arguments = list(self.words[1:])
        ours = arguments[:1] == ["-m"] or "".join(arguments[:1]).endswith(".py")
        return f"gradring run ... {shlex.join(arguments if ours else [python, *arguments])}"
