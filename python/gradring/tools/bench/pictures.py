"""Pictures by matplotlib, in one style: that of ``pictures.mplstyle``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_suffix(".mplstyle")


@contextlib.contextmanager
def drawing(more: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """`matplotlib.pyplot` without a screen, with ``more`` settings; closes its figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(more, STYLE):
        yield pyplot
        pyplot.close("all")
