"""The results as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradring.demo.results import RankResult, Results
from gradring.demo.tables import parts_of
from gradring.demo.variants import GRADRING, MIRRORED, SINGLE
from gradring.demo.verdict import REQUIRED_ACCURACY

NAME = "comparison.png"
INK, PAPER = "#1a1b1d", "#fefdfc"
"""Of text and lines, and between bars; colours that nothing else has."""
SIZE_INCHES, DOTS_PER_INCH = (11, 7.6), 130
COMPUTE, COMMUNICATION, WAITING = "#3b6ea5", "#e08a3c", "#c6c0b3"
MIXED = "#eab17f"
CURVES = (
    # Drawn on top of each other, so each must leave room for the next.
    {"color": "#b8b3a8", "linewidth": 5.0, "linestyle": "-"},
    {"color": "#3b6ea5", "linewidth": 1.8, "linestyle": "-"},
    {"color": "#e08a3c", "linewidth": 1.2, "linestyle": (0, (3, 3))},
)


def draw(results: Results, directory: Path) -> Path:
    """Writes the picture into the directory and returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    path = directory / NAME
    _save(results, path, format="png", dpi=DOTS_PER_INCH)
    return path


def drawn(results: Results) -> str:
    """The picture as an SVG element for a page, in the page's own colours of text and ground."""
    with io.StringIO() as file:
        # Letters are shapes, so that they have the room for which the picture was laid out.
        _save(results, file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "currentColor").replace(PAPER, "var(--ground)")


def _save(results: Results, target: Any, **options: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 10,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
        "hatch.color": PAPER,
        # Otherwise a picture's text differs from run to run.
        "svg.hashsalt": "gradring",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
    }
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplot_mosaic(
            [["bars", "bars"], ["loss", "accuracy"]],
            figsize=SIZE_INCHES,
            height_ratios=(1.0, 1.15),
            layout="constrained",
        )
        _bars(panels["bars"], results)
        _losses(panels["loss"], results)
        _accuracies(panels["accuracy"], results)
        figure.savefig(target, **options)
        pyplot.close(figure)


def _bars(axes: Any, results: Results) -> None:
    rows = [(f"{GRADRING.title}, rank {rank.rank}", rank, "gradring") for rank in results.gradring]
    rows += [(f"{MIRRORED.title}, rank {rank.rank}", rank, "mirrored") for rank in results.mirrored]
    rows.append((f"{SINGLE.title}, {len(results.gradring)} threads", results.single, "single"))
    # On a machine that others use, the step without a strategy can be the longer one.
    longest = max(max(rank.split.step_ms, rank.local_ms) for _, rank, _ in rows)
    for position, (_, rank, kind) in enumerate(rows):
        mixed = kind == "mirrored"
        colours = (COMPUTE, MIXED if mixed else COMMUNICATION, WAITING)
        left = 0.0
        for part, colour in zip(parts_of(rank, kind), colours, strict=True):
            hatch = "////" if colour == MIXED else None
            axes.barh(position, part, 0.66, left, color=colour, hatch=hatch, edgecolor=PAPER)
            left += part
        axes.text(left + longest * 0.008, position, f"{left:.2f} ms", va="center")
        if kind != "single":
            axes.vlines(rank.local_ms, position - 0.42, position + 0.42, color=INK, lw=1.6)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.09)
    axes.set_xlabel("milliseconds per step")
    cores = f"{results.cores} core{'s' if results.cores > 1 else ''}"
    axes.set_title(
        f"One step of {results.single.samples_per_step} images: "
        f"{len(results.gradring)} workers with one thread each, on a machine with {cores}"
    )
    axes.tick_params(axis="y", length=0)
    _legend_of_parts(axes, bool(results.mirrored))


def _legend_of_parts(axes: Any, with_mirrored: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=COMPUTE, label="compute"),
        Patch(facecolor=COMMUNICATION, label="communication"),
        Patch(facecolor=WAITING, label="waiting for the other rank"),
        Line2D([], [], color=INK, lw=1.6, label="the same step without a strategy"),
    ]
    if with_mirrored:
        label = "added by the strategy"
        handles.append(Patch(facecolor=MIXED, hatch="////", edgecolor=PAPER, label=label))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.43, -0.2), ncols=5, frameon=False
    )


def _losses(axes: Any, results: Results) -> None:
    for label, rank, look in _curves(results):
        axes.plot(range(1, rank.steps + 1), rank.losses, label=label, **look)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title("Training loss of the global batch")
    axes.legend(frameon=False)


def _accuracies(axes: Any, results: Results) -> None:
    for label, rank, look in _curves(results):
        axes.plot(range(1, len(rank.accuracies) + 1), rank.accuracies, label=label, **look)
    axes.axhline(REQUIRED_ACCURACY, color=INK, linewidth=0.8, alpha=0.5)
    axes.text(
        *(0.02, REQUIRED_ACCURACY),
        f"required: {REQUIRED_ACCURACY}",
        transform=axes.get_yaxis_transform(),
        va="bottom",
        alpha=0.7,
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("epoch")
    axes.set_title(f"Test accuracy: {results.gradring[0].accuracies[-1]:.3f} at the end")
    axes.legend(frameon=False, loc="lower right")


def _curves(results: Results) -> Sequence[tuple[str, RankResult, dict[str, Any]]]:
    ranks = [(f"{GRADRING.title}, rank {rank.rank}", rank) for rank in results.gradring]
    named = [(SINGLE.title, results.single), *ranks]
    return [(label, rank, look) for (label, rank), look in zip(named, CURVES, strict=True)]
