"""The program that ranks run, or the Python script or module under the interpreter of gradring."""

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
    """A command line as the user gave it; each host makes of it what it starts.

    Attributes:
        words: A program or a Python script, or with ``module`` a Python module; then arguments.
        module: As ``python -m``.
    """

    words: Sequence[str]
    module: bool = False

    def command(self, path: str | None) -> list[str]:
        """What is executed on this machine, where programs are looked for on ``path``."""
        if self.module:
            return [sys.executable, "-m", *self.words]
        return [sys.executable, *self.words] if self._is_script(path) else list(self.words)

    def problem(self, path: str | None) -> str | None:
        """Why this machine cannot start it, and what to type; None if it can."""
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
        if os.access(name, os.X_OK):  # given without its directory
            return f"there is no program {name!r} on PATH; type ./{name} for the file that is here"
        return f"{name!r} cannot be executed; type: chmod +x {shlex.quote(name)}"

    def advice_without(self, module: str, host: str, python: str) -> str | None:
        """What to say when this program failed for want of a Python module.

        Args:
            module: Its name.
            host: Where the program ran.
            python: The interpreter with gradring there.

        Returns:
            What to type, if the program chose another interpreter, and that of gradring would
            have found the module.
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
        """Whether it is a Python script: also with a ``#!`` line, unless it is found on PATH."""
        name = self.words[0]
        if self.module or Path(name).suffix != ".py":
            return False
        here = os.sep in name or os.path.exists(name)
        return here or shutil.which(name, path=path) is None

    def _with_our_python(self, python: str) -> str:
        """The same command under an interpreter that has gradring."""
        arguments = list(self.words[1:])
        ours = arguments[:1] == ["-m"] or "".join(arguments[:1]).endswith(".py")
        return f"gradring run ... {shlex.join(arguments if ours else [python, *arguments])}"
