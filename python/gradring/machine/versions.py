"""Versions of Python and of computing packages, and their differences between processes."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

#: Packages whose versions can change a training's results, by module.
PACKAGES = ("numpy", "tensorflow", "keras", "tf_keras", "ml_dtypes")
#: Limit of one version in messages, in characters; nightly builds have long ones.
_SHOWN = 24


def loaded() -> str:
    """Returns the versions in this process, such as ``Python 3.11.7, numpy 2.4.6``.

    Only packages imported already are listed; nothing is imported.
    """
    modules = {name: sys.modules.get(name) for name in PACKAGES}
    found = {name: getattr(module, "__version__", None) for name, module in modules.items()}
    each = {"Python": platform.python_version()} | found
    return ", ".join(f"{name} {str(each[name])[:_SHOWN]}" for name in each if each[name])


def differences(of_ranks: Sequence[str]) -> list[str]:
    """Returns a text for each package of which ranks have loaded several versions.

    A rank may not have loaded a package yet, so its absence is no difference.

    Args:
        of_ranks: Results of `loaded`, by rank.

    Returns:
        Texts such as ``["numpy 2.4.6 on rank 0, 1.26.4 on rank 3"]``, with the first rank of each
        version.
    """
    first: dict[str, dict[str, int]] = {}
    for rank, versions in enumerate(of_ranks):
        for each in filter(None, versions.split(", ")):
            name, _, version = each.partition(" ")
            first.setdefault(name, {}).setdefault(version, rank)
    return [
        f"{name} " + ", ".join(f"{version} on rank {rank}" for version, rank in ranks.items())
        for name, ranks in first.items()
        if len(ranks) > 1
    ]
