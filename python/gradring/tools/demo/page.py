"""The results as one file of HTML, which needs nothing else: no network, no script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from string import Template

from gradring.machine import resources
from gradring.tools.demo import picture, tables
from gradring.tools.demo.results import Results
from gradring.tools.demo.verdict import Check
from gradring.tools.doctor.here import versions

TEMPLATE = Path(__file__).with_name("page.html")


def page(results: Results, checked: Sequence[Check], why_no_mirrored: str | None) -> str:
    """The page: the verdict, the picture, and the numbers as the terminal shows them."""
    failed = sum(not check.passed for check in checked)
    numbers = [tables.rank_table(results.gradring), tables.comparison(results, why_no_mirrored)]
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
    return Template(TEMPLATE.read_text()).substitute(
        escaped, checks=checks, picture=picture.drawn(results)
    )
