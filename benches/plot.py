"""Time over size, p50 to p99, as a picture: `python -m benches.plot FILE.json PICTURE.png`.

The file is what `gradring bench all-reduce --json` writes. Each panel compares like with like.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.tables import Recorded
from gradring.tools.bench.comparison import ARRAY, OP, STRATEGY, comparisons
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.options import format_size
from gradring.tools.bench.pictures import drawing
from gradring.tools.bench.systems import link

LIMIT = "#8a8a8a"
P90_DASHES = (0, (4, 1.5))


@dataclass(frozen=True)
class Look:
    """How one system is drawn, in every picture alike."""

    title: str
    colour: str
    marker: str = "o"
    width: float = 1.6


#: By the first part of a system's name: in a panel, each occurs once.
LOOKS = {
    "gradring": Look("gradring", "#d1495b", "o", 2.4),
    "tensorflow": Look("TensorFlow", "#1f5fa8", "s"),
    "gloo": Look("Gloo", "#4f9d69", "^"),
    "mpi": Look("Open MPI", "#8d5fb0", "D"),
}
OTHER = "#b08a3c"
#: Titles of the panels, in their order.
KINDS = {
    f"{ARRAY} over TCP": "array, TCP",
    f"{ARRAY} through shared memory": "array, shared memory",
    f"{OP} over TCP": "TensorFlow op, TCP",
    f"{STRATEGY} over TCP": "strategy, TCP",
}

STYLE = {"font.size": 11, "axes.titlesize": 12, "axes.grid": True}


def draw(measured: list[Measurement], picture: Path) -> None:
    """Writes the picture.

    Raises:
        ValueError: There is nothing to draw, or it is of several dtypes or world sizes.
        OSError: The file cannot be written.
    """
    described = {(row.dtype, row.world_size) for row in measured}
    if len(described) != 1:
        raise ValueError("there must be measurements, all of one dtype and one number of ranks")
    ((dtype, world_size),) = described
    panels = _panels(measured)
    with drawing(STYLE) as pyplot:
        figure, all_axes = pyplot.subplots(
            1,
            len(panels),
            figsize=(max(3.1 * len(panels) + 1.0, 10.5), 5.4),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, (title, lines) in zip(all_axes[0], panels.items(), strict=True):
            _draw_panel(axes, title, lines)
        _draw_limit(all_axes[0][0], measured)
        all_axes[0][0].yaxis.set_major_formatter(lambda us, _: _time(us))
        figure.suptitle(
            f"Time of an all-reduce of {dtype}, {world_size} ranks of one machine",
            x=0.01,
            ha="left",
            weight="bold",
        )
        _draw_legend(figure, all_axes[0])
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.08)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=150)


def _panels(measured: list[Measurement]) -> dict[str, list[list[Measurement]]]:
    """By title: what its lines join, which is one system with one transport, over size."""
    found: dict[str, dict[tuple[str, str], list[Measurement]]] = {}
    for comparison in comparisons(sorted(measured, key=lambda row: row.bytes)):
        lines = found.setdefault(comparison.kind, {})
        for row in comparison.rows:
            lines.setdefault((row.system, row.transport), []).append(row)
    ordered = [*(kind for kind in KINDS if kind in found), *(set(found) - set(KINDS))]
    return {KINDS.get(kind, kind): list(found[kind].values()) for kind in ordered}


def _draw_panel(axes: Any, title: str, lines: list[list[Measurement]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line in lines:
        _draw_line(axes, line)
    sizes = sorted({row.bytes for line in lines for row in line})
    axes.set_title(title, pad=8)
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.tick_params(length=0)


def _draw_line(axes: Any, line: list[Measurement]) -> None:
    """p50 as a line with marks, p90 as a thin one, and a band from p50 to p99."""
    look = LOOKS.get(line[0].system.partition("-")[0], Look(line[0].system, OTHER, "v"))
    sizes = [row.bytes for row in line]
    medians = [row.median_us for row in line]
    p90s = [row.p90_us for row in line]
    p99s = [row.p90_us if row.p99_us is None else row.p99_us for row in line]
    order = 5 if look.title == "gradring" else 3
    axes.fill_between(sizes, medians, p99s, color=look.colour, alpha=0.16, linewidth=0)
    axes.plot(sizes, p99s, color=look.colour, linewidth=0.7, alpha=0.55, zorder=order)
    axes.plot(sizes, p90s, color=look.colour, linewidth=1.1, linestyle=P90_DASHES, zorder=order)
    axes.plot(
        sizes,
        medians,
        color=look.colour,
        linewidth=look.width,
        marker=look.marker,
        markersize=3.5 + look.width,
        label=look.title,
        zorder=order + 1,
    )


def _draw_limit(axes: Any, measured: list[Measurement]) -> None:
    """How long the bytes take on the raw link, as fast as it was at its best size on average."""
    limits_gbps = [row.busbw_gbps for row in measured if row.system == link.NAME]
    if not limits_gbps:
        return
    sizes = sorted({row.bytes for row in measured})
    world_size = measured[0].world_size
    times_us = [size * 2 * (world_size - 1) / world_size / max(limits_gbps) / 1e3 for size in sizes]
    lowest, highest = axes.get_ylim()
    title = f"raw TCP link, {max(limits_gbps):.1f} GB/s"
    axes.plot(sizes, times_us, color=LIMIT, linewidth=1.6, linestyle=":", zorder=2, label=title)
    axes.set_ylim(lowest, highest)


def _draw_legend(figure: Any, all_axes: Any) -> None:
    """Each system once, in the order in which they are met, and what the lines of one mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, title in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(title, handle)
    grey = "#555555"
    handles["p50"] = Line2D([], [], color=grey, linewidth=2, marker="o", markersize=5)
    handles["p90"] = Line2D([], [], color=grey, linewidth=1.1, linestyle=P90_DASHES)
    handles["up to p99"] = Patch(facecolor=grey, alpha=0.25)
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=len(handles),
        handlelength=2.4,
        columnspacing=1.6,
    )


def _time(us: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if us >= factor:
            return f"{us / factor:g} {unit}"
    return f"{us:g} \N{MICRO SIGN}s"


def main(arguments: list[str] | None = None) -> None:
    """Draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("measured", type=Path, metavar="FILE.json")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    options = parser.parse_args(arguments)
    try:
        draw(Recorded.read(options.measured).measurements, options.picture)
    except (OSError, ValueError) as error:
        raise SystemExit(f"benches.plot: {error}") from None


if __name__ == "__main__":
    main()
