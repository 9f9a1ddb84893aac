"""The results as one file of HTML, which needs nothing else: no network, no script."""

from __future__ import annotations

import datetime
import html
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import gradring
from gradring.demo.machine import describe
from gradring.demo.picture import drawn
from gradring.demo.results import RankResult, Results, mean_step_ms
from gradring.demo.tables import COLUMNS, HOW_AVERAGED, statements, warnings
from gradring.demo.variants import GRADRING, MIRRORED, SINGLE
from gradring.demo.verdict import Check

NAME = "report.html"

WITHOUT = "the same step on the same share of a batch, by this rank alone"
STYLE = Path(__file__).with_name("page.css")


def write(
    directory: Path, results: Results, checked: Sequence[Check], why_no_mirrored: str | None
) -> Path:
    """Writes the page into the directory and returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    path = directory / NAME
    path.write_text(page(results, checked, why_no_mirrored), encoding="utf-8")
    return path


def page(results: Results, checked: Sequence[Check], why_no_mirrored: str | None) -> str:
    """The page: the verdict and the numbers first, then what they are made of."""
    body = [
        "<h1>Two workers, one model</h1>",
        "<p class=\"soft\">gradring's demo: a small convolutional network on scikit-learn's "
        "handwritten digits, trained by two workers, by the same two under TensorFlow's own "
        "strategy, and by a single process.</p>",
        _verdict(checked),
        _figures(results),
        *(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(results)),
        "<h2>Time of a step, loss and accuracy</h2>",
        f'<div class="picture" role="img" aria-label="{_alternative(results)}">',
        f"{drawn(results)}</div>",
        "<h2>What the numbers say, and what they do not</h2>",
        *(f"<p>{html.escape(text)}</p>" for text in statements(results, why_no_mirrored)),
        "<h2>Every process</h2>",
        _table(results),
        f'<p class="soft">{html.escape(HOW_AVERAGED)}</p>',
        _definitions([*COLUMNS, ("without a strategy", WITHOUT)]),
        "<h2>Made with</h2>",
        _definitions(_made_with(results)),
        "<h2>Run it again</h2>",
        "<pre><code>gradring demo                    # this page\n"
        "gradring demo --slow-rank 1      # a slow rank is named\n"
        "gradring demo --kill 1           # a dead one too, and the job restarts</code></pre>",
        '<footer class="soft">Beside this page lie <code>comparison.png</code> and all that the '
        "trainings printed.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>gradring demo: {_outcome(checked)}</title>\n"
        f"<style>\n{STYLE.read_text()}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def _outcome(checked: Sequence[Check]) -> str:
    failed = sum(not check.passed for check in checked)
    return (
        f"{failed} of {len(checked)} checks failed"
        if failed
        else f"all {len(checked)} checks passed"
    )


def _verdict(checked: Sequence[Check]) -> str:
    kind = "good" if all(check.passed for check in checked) else "bad"
    items = "".join(
        f'<li class="{"passed" if check.passed else "failed"}">{html.escape(check.sentence)}</li>'
        for check in checked
    )
    outcome = _outcome(checked)
    return (
        f'<div class="verdict {kind}"><strong>{outcome[0].upper()}{outcome[1:]}</strong>'
        f"<ul>{items}</ul></div>"
    )


def _figures(results: Results) -> str:
    ours_ms = mean_step_ms(results.gradring)
    figures = [(f"{ours_ms:.2f} ms", f"a step with {GRADRING.title}")]
    if results.mirrored:
        theirs_ms = mean_step_ms(results.mirrored)
        figures += [
            (f"{theirs_ms:.2f} ms", f"a step with {MIRRORED.title}"),
            (
                f"{theirs_ms / ours_ms:.1f}&times;",
                f"{MIRRORED.title} against {GRADRING.title}",
            ),
        ]
    figures += [
        (f"{results.gradring[0].accuracies[-1]:.3f}", "test accuracy"),
        (f"{results.largest_difference:.0e}", "largest difference of a weight to one process"),
    ]
    cells = (
        f'<div class="figure"><b>{value}</b><span>{html.escape(name)}</span></div>'
        for value, name in figures
    )
    return f'<div class="figures">{"".join(cells)}</div>'


def _table(results: Results) -> str:
    header = (
        '<tr><th>process</th><th class="text">host</th><th>steps</th><th>samples/s</th>'
        "<th>step&nbsp;ms</th><th>compute</th><th>communi&shy;cation</th><th>waiting</th>"
        "<th>without a strategy</th><th>SHA-256</th></tr>"
    )
    rows = [_row(f"{GRADRING.title}, rank {rank.rank}", rank) for rank in results.gradring]
    rows += [
        _row(f"{MIRRORED.title}, rank {rank.rank}", rank, measured=False)
        for rank in results.mirrored
    ]
    rows.append(_row(SINGLE.title, results.single, alone=True))
    return f'<div class="wide"><table>{header}{"".join(rows)}</table></div>'


def _row(name: str, rank: RankResult, *, measured: bool = True, alone: bool = False) -> str:
    split = rank.split
    parts = (split.compute_ms, split.communication_ms, split.waiting_ms)
    # What a strategy does not measure is not 0.
    shown = [f"{part:.2f}" for part in parts] if measured else ["", "", ""]
    local = "" if alone else f"{rank.local_ms:.2f}"
    cells = [f"{rank.steps}", f"{rank.samples_per_s:,.0f}", f"{split.step_ms:.2f}"]
    numbers = "".join(f"<td>{html.escape(cell)}</td>" for cell in (*cells, *shown, local))
    return (
        f'<tr><td>{html.escape(name)}</td><td class="text">{html.escape(rank.host)}</td>{numbers}'
        f"<td><code>{rank.weights_hash}</code></td></tr>"
    )


def _definitions(pairs: Sequence[tuple[str, str]]) -> str:
    items = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in pairs)
    return f"<dl>{''.join(items)}</dl>"


def _made_with(results: Results) -> Sequence[tuple[str, str]]:
    build = gradring.build_info()
    versions = [
        f"gradring {gradring.__version__} ({build['instruction_set']})",
        *(_version(name) for name in ("tensorflow", "tensorflow-cpu", "keras", "numpy")),
        f"Python {platform.python_version()}",
    ]
    now = datetime.datetime.now().astimezone()
    return (
        ("when", f"{now:%Y-%m-%d %H:%M %Z}"),
        ("machine", describe(results.cores)),
        ("software", ", ".join(version for version in versions if version)),
    )


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _alternative(results: Results) -> str:
    """The picture in words, for those who cannot see it."""
    steps = ", ".join(
        f"{title} {mean_step_ms(ranks):.2f} ms"
        for title, ranks in ((GRADRING.title, results.gradring), (MIRRORED.title, results.mirrored))
        if ranks
    )
    return html.escape(
        f"Mean time of a step: {steps}. Curves of the loss and of the test accuracy."
    )
