"""The common style of matplotlib pictures, from ``pictures.mplstyle``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STYLE = Path(__file__).with_suffix(".mplstyle")


@contextlib.contextmanager
def drawing(more: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Yields `matplotlib.pyplot` without a screen, with ``more`` settings; closes all figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(more, STYLE):
        yield pyplot
        pyplot.close("all")
