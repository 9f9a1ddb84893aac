"""Versions of other packages, as tests/versions.toml has them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
_TABLE = tomllib.loads((ROOT / "tests" / "versions.toml").read_text())


@dataclass(frozen=True)
class Bounds:
    """What of a package is supported; `next` is what pip is asked for, or empty."""

    lowest: str
    highest: str
    next: str = ""


@dataclass(frozen=True)
class Versions:
    """One column of the table. `tf_keras` is released with each TensorFlow."""

    tensorflow: str
    keras: str
    tf_keras: str

    def __str__(self) -> str:
        return f"TF {self.tensorflow}, Keras {self.keras}"


def _bounds(table: dict[str, Any]) -> dict[str, Bounds]:
    return {name: Bounds(**values) for name, values in table.items() if name != "columns"}


#: By package.
BOUNDS = _bounds(_TABLE)
#: The columns.
MATRIX = tuple(Versions(**column) for column in _TABLE["columns"])
#: The names under which PyPI has Keras 3; both have its module.
KERAS = ("keras", "keras-nightly")


def installed(packages: Sequence[str]) -> str:
    """The version of the first of these packages that is installed; nothing is imported."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    raise metadata.PackageNotFoundError(" or ".join(packages))
