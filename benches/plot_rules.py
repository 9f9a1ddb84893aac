"""Pictures and a table of `benches.update_rules`: `python -m benches.plot_rules FILE.json PAGE.md`.

For each situation, a picture beside the page shows the loss on test images over time and over
bytes. In the page, the tables below these comments are written anew, so that no number is typed:

    <!-- all rules of benches/results/update-rules.json -->
    <!-- servers at one learning rate of benches/results/update-rules.json -->
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from benches.plot import STYLE
from benches.tables import markdown
from benches.update_rules import GOAL, RULES, SERVED, Training
from gradring.tools.bench.pictures import drawing

BASE = "all-reduce"
#: What the others of the same kind are compared with.
SYNCHRONOUS = "parameter-server"
COLOURS = ("#1f5fa8", "#4f9d69", "#8d5fb0", "#b08a3c", "#2a9d9d", "#d17a22", "#7a5c45", "#c24d8a")
TITLES = {
    "equal": "Three equal workers",
    "slow": "One of three workers three times slower",
    "gigabit": "Links of 1 Gbit/s, and a wider model",
}
_TABLE = re.compile(r"(<!-- (.*) of benches/results/update-rules\.json -->\n\n)(?:\|.*\n)+")

#: By situation and rule, one for each seed.
Trainings = dict[tuple[str, str], list[Training]]


def read(record: Path) -> Trainings:
    """Reads a file of `benches.update_rules`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is something else.
    """
    found: Trainings = {}
    try:
        recorded = json.loads(record.read_text())
        for name in recorded:
            for row in recorded[name]["trainings"]:
                training = Training(**row)
                found.setdefault((training.situation, training.rule), []).append(training)
    except (LookupError, TypeError):
        raise ValueError(f"{record} has no trainings of benches.update_rules") from None
    return found


def draw(trainings: Trainings, situation: str, picture: Path) -> None:
    """Writes the picture of one situation."""
    grouped = [name for name in RULES if name not in SERVED]
    with drawing(STYLE) as pyplot:
        figure, all_axes = pyplot.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
        kinds = (("workers as one group", grouped), ("parameter servers", [BASE, *SERVED]))
        for (kind, names), row in zip(kinds, all_axes, strict=True):
            for axes, what in zip(row, ("seconds", "megabytes"), strict=True):
                for number, name in enumerate(names):
                    _draw_line(axes, what, name, number, trainings.get((situation, name), []))
                axes.set_yscale("log")
                axes.set_title(f"{kind}: loss over {what.replace('bytes', 'bytes sent')}", pad=8)
                axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
                axes.tick_params(length=0, which="both")
                if what == "seconds":
                    axes.set_xlim(left=0)
                else:
                    axes.set_xscale("log")
                    axes.xaxis.set_major_formatter(lambda megabytes, _: f"{megabytes:g}")
            row[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        title = f"{TITLES[situation]}; a dot where the test accuracy reaches {GOAL}"
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=110)


def _draw_line(axes: Any, what: str, name: str, number: int, trainings: list[Training]) -> None:
    if not trainings:
        return
    base = name == BASE
    colour = "#333333" if base else COLOURS[number - 1]
    width = 2.6 if base else 1.6
    axes.plot(
        _means(getattr(it, what) for it in trainings),
        _means(it.losses for it in trainings),
        color=colour,
        linewidth=width,
        alpha=0.55 if base else 0.9,
        label=name,
    )
    if reached := _reached(trainings):
        at = reached[("seconds", "megabytes").index(what)]
        xs, ys = (_means(getattr(it, of) for it in trainings) for of in (what, "losses"))
        loss = next((y for x, y in zip(xs, ys, strict=True) if x >= at), ys[-1])
        axes.plot([at], [loss], "o", color=colour, markersize=7, zorder=5)


def _means(columns: Iterable[list[float]]) -> list[float]:
    return [mean(row) for row in zip(*columns, strict=True)]


def rewritten(page: str, trainings: Trainings) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: It has a table of something else.
    """

    def written(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"{found[2]!r} is none of the tables {', '.join(TABLES)}")
        return found[1] + markdown(TABLES[found[2]](trainings))

    return _TABLE.sub(written, page)


def _all_rules(trainings: Trainings) -> Iterable[list[str]]:
    """After what each rule has reached the goal, by situation."""
    head = ("rule", "equal", "sent", "1 Gbit/s", "sent", "one slow")
    yield [*head, "times as soon", "best accuracy"]
    base = _reached(trainings["slow", BASE])
    for rule in RULES:
        equal, linked, slow = (trainings[name, rule] for name in ("equal", "gigabit", "slow"))
        ratio, best = _ratio(base, _reached(slow)), _least_best(slow)
        yield [f"`{rule}`", *_cells(equal), *_cells(linked), _cells(slow)[0], ratio, best]


def _alike(trainings: Trainings) -> Iterable[list[str]]:
    """How much sooner each rule of servers reaches the goal than the synchronous one."""
    yield ["rule", "one slow", "times as soon", "best accuracy"]
    synchronous = _reached(trainings["slow-alike", SYNCHRONOUS])
    for name in SERVED:
        some = trainings["slow-alike", name]
        ratio = _ratio(synchronous, _reached(some))
        yield [f"`{name}`", _cells(some)[0], ratio, _least_best(some)]


TABLES = {"all rules": _all_rules, "servers at one learning rate": _alike}


def _least_best(trainings: list[Training]) -> str:
    return f"{min(max(it.accuracies) for it in trainings):.3f}"


def _ratio(one: tuple[float, float] | None, other: tuple[float, float] | None) -> str:
    """Of seconds."""
    return f"{one[0] / other[0]:.2f}" if one and other else "-"


def _reached(trainings: list[Training]) -> tuple[float, float] | None:
    """After how many seconds and megabytes, on average, if all do."""
    reached = [found for it in trainings if (found := it.reached(GOAL))]
    if not reached or len(reached) < len(trainings):
        return None
    seconds, megabytes = zip(*reached, strict=True)
    return mean(seconds), mean(megabytes)


def _cells(trainings: list[Training]) -> list[str]:
    reached = _reached(trainings)
    return ["-", "-"] if reached is None else [f"{reached[0]:.1f} s", f"{reached[1]:.3g} MB"]


def main(arguments: list[str] | None = None) -> None:
    """Draws, and rewrites the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("record", type=Path, metavar="FILE.json")
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    options = parser.parse_args(arguments)
    try:
        trainings = read(options.record)
        options.page.write_text(rewritten(options.page.read_text(), trainings))
        for situation in TITLES.keys() & {name for name, _ in trainings}:
            draw(trainings, situation, options.page.parent / "images" / f"rules-{situation}.png")
    except (OSError, ValueError) as error:
        raise SystemExit(f"benches.plot_rules: {error}") from None


if __name__ == "__main__":
    main()
