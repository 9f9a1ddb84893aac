"""Report of the demo: its results as text, as a picture, and as a page of HTML.

Only the picture imports matplotlib. The page is self-contained, without network and scripts.
"""

from __future__ import annotations

import html
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from gradring.config.words import counted
from gradring.machine import resources
from gradring.tools.bench.pictures import drawing
from gradring.tools.demo.results import (
    GRADRING,
    HASH_DIGITS,
    MIRRORED,
    REQUIRED_ACCURACY,
    SINGLE,
    Check,
    RankResult,
    Results,
    mean,
)
from gradring.tools.doctor.here import versions

WIDTH = 100
COLUMNS = (
    ("step ms", "duration of a step, from asking for the batch to having the loss"),
    ("compute", "all of it in which the step does not stand still for a collective"),
    ("communication", "time in which it stands still while bytes move and are summed"),
    ("waiting", "time in which it stands still because the other rank has not arrived yet"),
    ("samples/s", "this rank's images per step, divided by the duration of a step"),
    ("SHA-256", f"first {HASH_DIGITS} hex digits of the hash of all weights' bytes"),
)
HOW_AVERAGED = "Times are averages of all steps but the first, which builds the graphs."
#: Processor share of other programs above which the report warns about its times.
BUSY_SHARE = 0.1
PICTURE = "comparison.png"
#: Colours of text and lines, and of gaps between bars; no other element has them.
INK, PAPER = "#1a1b1d", "#fefdfc"
SIZE_INCHES, DOTS_PER_INCH = (11, 7.6), 130
PARTS = {
    "compute": "#3b6ea5",
    "communication": "#e08a3c",
    "waiting for the other rank": "#c6c0b3",
    "added by the strategy": "#eab17f",
}
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
CURVES = (
    # The curves overlap, so each is narrower than the one below.
    {"color": "#b8b3a8", "linewidth": 5.0, "linestyle": "-"},
    {"color": "#3b6ea5", "linewidth": 1.8, "linestyle": "-"},
    {"color": "#e08a3c", "linewidth": 1.2, "linestyle": (0, (3, 3))},
)
TEMPLATE = Path(__file__).with_name("page.html")


def rank_table(ranks: Sequence[RankResult]) -> str:
    """Returns a table with one row per rank, followed by the meaning of each column."""
    width = max(len("host"), *(len(rank.host) for rank in ranks))
    lines = [
        f"rank  {'host':<{width}}  steps  samples/s  step ms = compute + communication + waiting  "
        "SHA-256 of the weights"
    ]
    for rank in ranks:
        compute, communication, waiting = rank.parts_ms
        lines.append(
            f"{rank.rank:>4}  {rank.host:<{width}}  {rank.steps:>5}  {rank.samples_per_s:>9,.0f}  "
            f"{rank.step_ms:>7.2f}   {compute:>7.2f}   {communication:>13.2f}   {waiting:>7.2f}  "
            f"{rank.weights_hash}"
        )
    lines += ["", *(f"  {name:<14} {meaning}" for name, meaning in COLUMNS), f"  {HOW_AVERAGED}"]
    return "\n".join(lines)


def verdict(checked: Sequence[Check]) -> str:
    """Returns one paragraph per check."""
    return "\n".join(
        textwrap.fill(
            f"{'passed' if check.passed else 'FAILED'}  {check.sentence}",
            WIDTH,
            subsequent_indent=" " * 8,
        )
        for check in checked
    )


def comparison(results: Results, why_no_mirrored: str | None) -> str:
    """Returns paragraphs that compare the trainings, with the limits of the comparison."""
    sentences = [_against_single(results), _percentiles(results)]
    if results.mirrored:
        sentences = [_against_mirrored(results), _hashes(results), *sentences]
    elif why_no_mirrored is not None:
        why = f"There is no comparison with {MIRRORED.title}Strategy: {why_no_mirrored}"
        sentences.insert(0, why)
    if max(results.others.values()) > BUSY_SHARE:
        listed = ", ".join(f"{title} {share:.0%}" for title, share in results.others.items())
        sentences.append(
            "Compare these times with care: other programs used this machine at the same time. "
            f"Their share of its processors during each training: {listed}."
        )
    return "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)


def _against_mirrored(results: Results) -> str:
    def facts(ranks: Sequence[RankResult]) -> tuple[float, float, float]:
        step_ms, local_ms = mean(ranks, "step_ms"), mean(ranks, "local_ms")
        return step_ms, local_ms, 1 - local_ms / step_ms

    (ours_ms, our_local_ms, ours), (theirs_ms, their_local_ms, theirs) = map(
        facts, (results.gradring, results.mirrored)
    )
    return (
        f"{MIRRORED.title}Strategy takes {theirs_ms:.2f} ms per step of the same script, gradring "
        f"{ours_ms:.2f} ms: a ratio of {theirs_ms / ours_ms:.1f}. In the same processes, the same "
        f"step takes {their_local_ms:.2f} and {our_local_ms:.2f} ms without a strategy, so the "
        f"strategies add {theirs:.0%} and {ours:.0%} of their steps: communication, waiting, and "
        "their own work."
    )


def _hashes(results: Results) -> str:
    ours, theirs = (
        {r.weights_hash for r in ranks} for ranks in (results.gradring, results.mirrored)
    )
    listed = " and ".join(sorted(theirs))
    if ours == theirs:
        return f"Its weights have the same hash, {listed}: adding two numbers has only one order."
    return f"Its weights have the hash {listed}."


def _against_single(results: Results) -> str:
    workers = len(results.gradring)
    total = sum(rank.samples_per_s for rank in results.gradring)
    single = results.single.samples_per_s
    cores = counted(results.cores, "core")
    share = f"Both kinds may use {workers} threads in all on this machine's {cores}"
    if results.cores <= workers:
        share = f"The {workers} workers share this machine's {cores} with each other"
    return (
        f"The single process, with {workers} threads, trains {single:,.0f} samples/s; the "
        f"{workers} workers, with one each, {total:,.0f} together. {share}, so this ratio of "
        f"{total / single:.2f} shows overhead, not scaling."
    )


def _percentiles(results: Results) -> str:
    """Returns percentiles of each training's first rank, since ranks step together."""
    trainings = (
        (GRADRING.title, results.gradring),
        (MIRRORED.title, results.mirrored),
        (SINGLE.title, (results.single,)),
    )
    listed = ", ".join(
        f"{title} {' / '.join(f'{ms:.2f}' for ms in ranks[0].percentiles_ms)}"
        for title, ranks in trainings
        if ranks
    )
    return f"p50 / p90 / p99 of all steps but the first, in ms: {listed}."


def draw(results: Results, directory: Path) -> Path:
    """Writes the picture into the directory and returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    path = directory / PICTURE
    _save(results, path, format="png", dpi=DOTS_PER_INCH)
    return path


def drawn(results: Results) -> str:
    """Returns the picture as an SVG element, in the page's own colours of text and background."""
    with io.StringIO() as file:
        # Letters are drawn as shapes, so that the layout does not depend on fonts.
        _save(results, file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "currentColor").replace(PAPER, "var(--ground)")


def _save(results: Results, target: Any, **options: Any) -> None:
    with drawing(dict.fromkeys(INKED, INK)) as pyplot:
        figure, panels = pyplot.subplot_mosaic(
            [["bars", "bars"], ["loss", "accuracy"]], figsize=SIZE_INCHES, layout="constrained"
        )
        _bars(panels["bars"], results)
        _curves(panels["loss"], panels["accuracy"], results)
        figure.savefig(target, **options)


def _bars(axes: Any, results: Results) -> None:
    rows: list[tuple[str, RankResult, tuple[float, ...]]] = [
        (f"{GRADRING.title}, rank {rank.rank}", rank, rank.parts_ms) for rank in results.gradring
    ]
    for rank in results.mirrored:
        # This strategy has no counters; its time beyond the local step includes waiting and all
        # other work.
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
        f"thread each, on a machine with {counted(results.cores, 'core')}"
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


def page(results: Results, checked: Sequence[Check], why_no_mirrored: str | None) -> str:
    """Returns the page: the verdict, the picture, and the numbers as shown in the terminal."""
    failed = sum(not check.passed for check in checked)
    numbers = [rank_table(results.gradring), comparison(results, why_no_mirrored)]
    texts = {
        "outcome": f"{failed} of {len(checked)} checks failed"
        if failed
        else f"All {len(checked)} checks passed",
        "numbers": "\n\n".join(numbers),
        "software": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "machine": resources.machine(),
        "date": resources.date(),
    }
    checks = "".join(
        f'<li class="{"passed" if check.passed else "failed"}">{html.escape(check.sentence)}</li>'
        for check in checked
    )
    escaped = {name: html.escape(text) for name, text in texts.items()}
    return Template(TEMPLATE.read_text()).substitute(escaped, checks=checks, picture=drawn(results))
