"""Time and busbw over size as a picture: `python -m benches.plot FILE.json PICTURE.png`.

The file is what `gradring bench all-reduce --json` writes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradring.bench.measurement import Measurement
from gradring.bench.plan import format_size
from gradring.bench.systems import link

LIMIT = "#8a8a8a"


@dataclass(frozen=True)
class Look:
    """How one system is drawn, in every picture alike; shared memory is dashed."""

    title: str
    colour: str
    marker: str = "o"
    width: float = 1.5


LOOKS = {
    "gradring": Look("gradring", "#d1495b", "o", 2.6),
    "gradring-op": Look("gradring in TensorFlow", "#e8a0a8", "o", 1.8),
    "tensorflow-strategy": Look("TensorFlow MWMS", "#1f5fa8", "s"),
    "tensorflow-raw": Look("TensorFlow raw op, tuned", "#7fb0de", "s"),
    "gloo": Look("Gloo", "#4f9d69", "^"),
    "mpi": Look("Open MPI", "#8d5fb0", "D"),
}
OTHER = Look("", "#b08a3c", "v")

STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
}


def draw(measured: list[Measurement], picture: Path) -> None:
    """Writes the picture.

    Raises:
        ValueError: There is nothing to draw, or it is of several dtypes or world sizes.
        OSError: The file cannot be written.
    """
    kinds = {(row.dtype, row.world_size) for row in measured}
    if len(kinds) != 1:
        raise ValueError("there must be measurements, all of one dtype and one number of ranks")
    ((dtype, world_size),) = kinds
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limits_gbps = [row.busbw_gbps for row in measured if row.system == link.NAME]
    with pyplot.rc_context(STYLE):
        figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
        for axes in (times, bandwidths):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        for line in _lines(measured):
            _plot(times, line, [row.median_us for row in line])
            _plot(bandwidths, line, [row.busbw_gbps for row in line])
        sizes = sorted({row.bytes for row in measured})
        if limits_gbps:
            _draw_limit(times, bandwidths, sizes, limits_gbps, world_size)
        _dress(times, sizes, f"Time of an all-reduce, {world_size} ranks, {dtype}")
        times.yaxis.set_major_formatter(lambda us, _: _time(us))
        _dress(bandwidths, sizes, "Bus bandwidth, in each direction")
        bandwidths.yaxis.set_major_formatter(lambda gbps, _: _bandwidth(gbps))
        handles, labels = bandwidths.get_legend_handles_labels()
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, frameon=False, handlelength=3
        )
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=150)
        pyplot.close(figure)


def read(path: Path) -> list[Measurement]:
    """The measurements in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is something else.
    """
    found = json.loads(path.read_text())
    try:
        return [Measurement(**row) for row in found["measurements"]]
    except (KeyError, TypeError):
        raise ValueError(f"{path} has no measurements of gradring bench all-reduce") from None


def _lines(measured: list[Measurement]) -> list[list[Measurement]]:
    """What one line joins: a system with one transport, over size; in the order of `LOOKS`."""
    lines: dict[tuple[str, str], list[Measurement]] = {}
    for row in sorted(measured, key=lambda row: row.bytes):
        if row.system not in (link.NAME, link.CACHED_NAME):
            lines.setdefault((row.system, row.transport), []).append(row)
    known = list(LOOKS)

    def place(key: tuple[str, str]) -> tuple[int, bool]:
        return (known.index(key[0]) if key[0] in known else len(known), key[1] == "shm")

    return [lines[key] for key in sorted(lines, key=place)]


def _plot(axes: Any, line: list[Measurement], values: list[float]) -> None:
    system, transport = line[0].system, line[0].transport
    look = LOOKS.get(system, OTHER)
    shared = transport == "shm"
    place = {"shm": "shared memory", "grpc": "gRPC", "tcp": "TCP", "tls": "TLS"}.get(
        transport, transport
    )
    axes.plot(
        [row.bytes for row in line],
        values,
        color=look.colour,
        linewidth=look.width,
        linestyle=(0, (4, 1.6)) if shared else "-",
        marker=look.marker,
        markersize=4.0 + look.width,
        markerfacecolor="white" if shared else look.colour,
        label=f"{look.title or system}, {place}",
        zorder=5 if system == "gradring" else 3,
    )


def _draw_limit(
    times: Any, bandwidths: Any, sizes: list[int], limits_gbps: list[float], world_size: int
) -> None:
    """The raw link: what it carried at best on average, and how long the bytes take with that."""
    limit_gbps = max(limits_gbps)
    look = {"color": LIMIT, "linewidth": 1.6, "linestyle": ":", "zorder": 2}
    bandwidths.axhline(limit_gbps, label=f"raw TCP link, {limit_gbps:.1f} GB/s", **look)
    lowest, highest = times.get_ylim()
    moved = [size * 2 * (world_size - 1) / world_size for size in sizes]
    times.plot(sizes, [bytes_ / limit_gbps / 1e3 for bytes_ in moved], **look)
    times.set_ylim(lowest, highest)


def _dress(axes: Any, sizes: list[int], title: str) -> None:
    axes.set_title(title, pad=10)
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.tick_params(length=0)


def _time(us: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if us >= factor:
            return f"{us / factor:g} {unit}"
    return f"{us:g} µs"


def _bandwidth(gbps: float) -> str:
    for unit, factor in (("GB/s", 1.0), ("MB/s", 1e-3)):
        if gbps >= factor * 0.999:
            return f"{gbps / factor:g} {unit}"
    return f"{gbps * 1e6:g} kB/s"


def main(arguments: list[str] | None = None) -> None:
    """Draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("measured", type=Path, metavar="FILE.json")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    options = parser.parse_args(arguments)
    try:
        draw(read(options.measured), options.picture)
    except (OSError, ValueError) as error:
        raise SystemExit(f"benches.plot: {error}") from None


if __name__ == "__main__":
    main()
