"""References to functions for other interpreters: by name, or pickled by value.

A test file is perhaps not importable, and a script's functions live in ``__main__``: both are
loaded by path. The script is ``__main__`` in the parent and `SCRIPT` in the child, so that its ``if
__name__ == "__main__":`` part does not run again.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from gradring.machine import packages

SCRIPT = "__gradring_main__"


@dataclass(frozen=True)
class FunctionName:
    """The module and name of a module-level function.

    Attributes:
        module: Its module's name, `SCRIPT` for the running script.
        path: The file of that module, if it has one.
        name: The function's own name, with the classes around it.
        is_main: True if the module is ``__main__`` in the parent.
    """

    module: str
    path: str | None
    name: str
    is_main: bool = False

    @classmethod
    def of(cls, function: Callable[..., object]) -> FunctionName:
        """Returns the name of a function.

        Raises:
            TypeError: The function is a lambda, a closure or another object without a name in a
                module.
        """
        name = getattr(function, "__qualname__", "<")
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if "<" in name or module is None:
            raise TypeError(
                f"{function!r} is not a function at the top level of a module; each rank is a "
                "fresh interpreter and has to find it by name, so define it there"
            )
        path = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        if module.__name__ != "__main__":
            return cls(module.__name__, path, name)
        # Started with python -m; only the name of a directory's program is ambiguous.
        if spec is not None and spec.name != "__main__":
            return cls(spec.name, path, name, is_main=True)
        if path is None:
            raise TypeError(f"{name} was typed in, and no other interpreter can find it")
        return cls(SCRIPT, path, name, is_main=True)

    def load(self) -> Callable[..., Any]:
        """Finds the function in this interpreter."""
        found: Any = self._module()
        if self.is_main:
            sys.modules["__main__"] = found  # the parent's pickles name this module
        for part in self.name.split("."):
            found = getattr(found, part)
        assert callable(found)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def dumps(value: object) -> bytes:
        """Pickles an argument or result of the function."""
        return pickle.dumps(value)

    def _module(self) -> ModuleType:
        if self.module != SCRIPT:
            try:
                module = importlib.import_module(self.module)
            except ModuleNotFoundError as error:
                if not f"{self.module}.".startswith(f"{error.name}."):
                    raise  # the module exists, but an import in it fails
            else:
                if self.path is None or _same_file(module, self.path):
                    return module
        return self._module_by_path()

    def _module_by_path(self) -> ModuleType:
        assert self.path is not None
        # Python chooses the loader by the suffix, which a script can lack.
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        if spec is None:
            loader = SourceFileLoader(self.module, self.path)
            spec = importlib.util.spec_from_file_location(self.module, self.path, loader=loader)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class FunctionByValue:
    """A function pickled with its code, since a notebook's cells are in no file.

    Attributes:
        pickled: The pickled function.
    """

    pickled: bytes

    @classmethod
    def of(cls, function: Callable[..., object]) -> FunctionByValue:
        """Pickles the function.

        Raises:
            ModuleNotFoundError: cloudpickle is not installed.
            TypeError: The function uses objects that cannot be pickled.
        """
        return cls(cls.dumps(function))

    def load(self) -> Callable[..., Any]:
        """Unpickles the function in this interpreter."""
        return pickle.loads(self.pickled)  # type: ignore[no-any-return]

    @staticmethod
    def dumps(value: object) -> bytes:
        """Pickles an argument or result of the function; its class can be defined in a cell too.

        Raises:
            ModuleNotFoundError: cloudpickle is not installed.
            TypeError: The value cannot be pickled.
        """
        with packages.needed_by("a function of a notebook"):
            import cloudpickle
        try:
            return cloudpickle.dumps(value)  # type: ignore[no-any-return]
        except Exception as error:
            raise TypeError(
                f"{getattr(value, '__qualname__', value)!s} cannot be sent to another process, or "
                f"uses an object that cannot: {error}; make that object inside the function"
            ) from error


def load_from_rank(data: bytes) -> Any:
    """Unpickles data of a rank; finds classes of the running script in ``__main__``.

    Use it only for files written by our own children.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == SCRIPT else module, name)


def _same_file(module: ModuleType, path: str) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and Path(found).resolve() == Path(path).resolve()
