"""A picture of time over ranks, with the lower bounds of every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradring.tools.bench.options import format_size
from gradring.tools.bench.pictures import drawing
from gradring.tools.bench.table import format_time
from gradring.tools.simulate.simulation import Simulated

COLOURS = ("#d1495b", "#1f5fa8", "#4f9d69", "#8d5fb0", "#b08a3c", "#30424f", "#c77dba")
BOUNDS = {
    "bandwidth_bound_us": ("2(N-1)/N S/B", (0, (4, 2))),
    "latency_bound_us": ("log2(N) latency", (0, (1, 2))),
}


def draw(simulated: Sequence[Simulated], path: Path) -> None:
    """Writes the picture: a panel for each size, a line for each requested algorithm.

    Raises:
        OSError: The file cannot be written.
    """
    sizes = sorted({row.bytes for row in simulated})
    wanted = list(dict.fromkeys(row.wanted for row in simulated))
    with drawing({"axes.grid": True}) as pyplot:
        figure, panels = pyplot.subplots(
            1,
            len(sizes),
            figsize=(max(4.2 * len(sizes), 6.5), 4.8),
            squeeze=False,
            layout="constrained",
        )
        for axes, size in zip(panels[0], sizes, strict=True):
            _panel(axes, [row for row in simulated if row.bytes == size], wanted)
            axes.set_title(format_size(size))
        panels[0][0].set_ylabel("simulated time")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=130, format="png")


def _panel(axes: Any, rows: Sequence[Simulated], wanted: Sequence[str]) -> None:
    for number, name in enumerate(wanted):
        line = sorted((row.world_size, row.time_us) for row in rows if row.wanted == name)
        axes.plot(
            [ranks for ranks, _ in line],
            [time for _, time in line],
            marker="o",
            markersize=4,
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    for name, (title, dashes) in BOUNDS.items():
        bound = sorted({(row.world_size, getattr(row, name)) for row in rows})
        axes.plot(*zip(*bound, strict=True), color="#555555", linestyle=dashes, label=title)
    ranks = sorted({row.world_size for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [str(count) for count in ranks], rotation=60)
    axes.yaxis.set_major_formatter(lambda us, _: format_time(us))
    axes.set_xlabel("ranks")
