"""The results as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradring.tools.demo.results import RankResult, Results
from gradring.tools.demo.trainings import GRADRING, MIRRORED, SINGLE
from gradring.tools.demo.verdict import REQUIRED_ACCURACY

NAME = "comparison.png"
#: Of text and lines, and between bars; colours that nothing else has.
INK, PAPER = "#1a1b1d", "#fefdfc"
SIZE_INCHES, DOTS_PER_INCH = (11, 7.6), 130
PARTS = {
    "compute": "#3b6ea5",
    "communication": "#e08a3c",
    "waiting for the other rank": "#c6c0b3",
    "added by the strategy": "#eab17f",
}
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    # Otherwise a picture's text differs from run to run.
    "svg.hashsalt": "gradring",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
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

    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplot_mosaic(
            [["bars", "bars"], ["loss", "accuracy"]], figsize=SIZE_INCHES, layout="constrained"
        )
        _bars(panels["bars"], results)
        _curves(panels["loss"], panels["accuracy"], results)
        figure.savefig(target, **options)
        pyplot.close(figure)


def _bars(axes: Any, results: Results) -> None:
    rows: list[tuple[str, RankResult, tuple[float, ...]]] = [
        (f"{GRADRING.title}, rank {rank.rank}", rank, rank.parts_ms) for rank in results.gradring
    ]
    for rank in results.mirrored:
        # It measures nothing itself: what it adds to the local step holds waiting and all else.
        local_ms = min(rank.local_ms, rank.step_ms)
        parts = (local_ms, 0.0, 0.0, rank.step_ms - local_ms)
        rows.append((f"{MIRRORED.title}, rank {rank.rank}", rank, parts))
    single = results.single
    rows.append((f"{SINGLE.title}, {len(results.gradring)} threads", single, single.parts_ms))
    names, ranks, widths = zip(*rows, strict=True)
    ends = [0.0] * len(rows)
    for number, (label, colour) in enumerate(PARTS.items()):
        lengths = [parts[number] if number < len(parts) else 0.0 for parts in widths]
        axes.barh(names, lengths, 0.66, ends, color=colour, edgecolor=PAPER, label=label)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for position, rank in enumerate(ranks):
        axes.text(ends[position], position, f" {ends[position]:.2f} ms", va="center")
        if rank is not single:
            axes.vlines(rank.local_ms, position - 0.42, position + 0.42, color=INK)
    axes.plot([], [], color=INK, label="the same step without a strategy")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("milliseconds per step")
    axes.set_title(
        f"One step of {single.samples_per_step} images: {len(results.gradring)} workers with one "
        f"thread each, on a machine with {results.cores} core{'s' if results.cores > 1 else ''}"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.43, -0.2), ncols=5)


def _curves(losses: Any, accuracies: Any, results: Results) -> None:
    named: Sequence[tuple[str, RankResult]] = [
        (SINGLE.title, results.single),
        *((f"{GRADRING.title}, rank {rank.rank}", rank) for rank in results.gradring),
    ]
    for (label, rank), look in zip(named, CURVES, strict=True):
        losses.plot(range(1, rank.steps + 1), rank.losses, label=label, **look)
        accuracies.plot(range(1, len(rank.accuracies) + 1), rank.accuracies, label=label, **look)
    losses.set(yscale="log", xlabel="step", title="Training loss of the global batch")
    accuracies.axhline(
        REQUIRED_ACCURACY,
        color=INK,
        linewidth=0.8,
        alpha=0.5,
        label=f"required: {REQUIRED_ACCURACY}",
    )
    accuracies.xaxis.get_major_locator().set_params(integer=True)
    reached = results.gradring[0].accuracies[-1]
    accuracies.set(xlabel="epoch", title=f"Test accuracy: {reached:.3f} at the end")
    losses.legend()
    accuracies.legend(loc="lower right")
