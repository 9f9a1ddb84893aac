"""The demo's results as text, and its line of progress."""

import io
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_up import rank_result, results

from gradring.tools.demo import report
from gradring.tools.demo.report import INK, PAPER, draw, page
from gradring.tools.demo.results import Check, checks
from gradring.tools.demo.story import LiveLine

LINE = "[0] epoch 3/20 step 60 loss 0.5000 test accuracy 0.800\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_has_a_row_per_rank_whose_parts_add_up() -> None:
    ranks = [rank_result(0), rank_result(1, host="a-host-with-a-long-name")]
    header, first, second, *_ = report.rank_table(ranks).splitlines()
    assert first.split() == [
        "0",
        "node-a",
        "4",
        "4,000",
        "9.00",
        "6.00",
        "1.00",
        "2.00",
        ranks[0].weights_hash,
    ]
    assert second.split()[1] == "a-host-with-a-long-name"
    assert len(first) == len(second)
    assert first.index(ranks[0].weights_hash) == header.index("SHA-256")


def test_every_column_of_the_split_is_explained() -> None:
    text = report.rank_table([rank_result()])
    for name, meaning in report.COLUMNS:
        assert f"{name:<14} {meaning}" in text


def test_the_comparison_states_the_ratio_and_no_speed_up() -> None:
    said = " ".join(report.comparison(results(), None).split())
    assert "takes 18.00 ms per step" in said
    assert "a ratio of 2.0" in said
    assert "72% and 44%" in said
    assert "the same hash" in said
    other = tuple(replace(rank, weights=(np.ones(3),)) for rank in results().mirrored)
    unlike = " ".join(report.comparison(results(mirrored=other), None).split())
    assert f"Its weights have the hash {other[0].weights_hash}. " in unlike
    assert "share this machine's 2 cores" in said
    assert "ratio of 0.89 shows overhead, not scaling" in said
    more = " ".join(report.comparison(results(cores=8), None).split())
    assert "Both kinds may use 2 threads in all on this machine's 8 cores, so" in more
    assert "gradring 9.00 / 12.50 / 30.00, MultiWorkerMirrored 18.00 / 20.00 / 45.00, " in said


def test_a_busy_machine_is_mentioned_and_an_idle_one_is_not() -> None:
    assert "with care" not in report.comparison(results(), None)
    busy = {"gradring": 0.4, "single process": 0.0}
    said = " ".join(report.comparison(results(others=busy), None).split())
    assert "with care" in said
    assert "gradring 40%, single process 0%" in said


def test_a_missing_comparison_is_explained() -> None:
    said = report.comparison(results(mirrored=()), "it never ended")
    assert "no comparison with MultiWorkerMirroredStrategy: it never ended" in said
    assert said.count("MultiWorkerMirrored") == 1
    assert "comparison" not in report.comparison(results(mirrored=()), None)


def test_failed_checks_stand_out() -> None:
    text = report.verdict([Check(True, "Good."), Check(False, "Bad.")])
    assert text.splitlines() == ["passed  Good.", "FAILED  Bad."]


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    live = LiveLine("gradring", stream)
    live.feed(LINE)
    live.feed("[0] something else that a rank prints\n")
    assert stream.getvalue().count("\n") == 0
    shown = stream.getvalue().rpartition("\r")[2]
    assert shown.endswith("gradring             epoch 3/20 step 60 loss 0.5000 test accuracy 0.800")
    live.show("done", last=True)
    assert stream.getvalue().endswith("done\n")


def test_elsewhere_lines_are_plain_and_rare() -> None:
    stream = io.StringIO()
    live = LiveLine("gradring", stream)
    for _ in range(50):
        live.feed(LINE)
    live.show("done", last=True)
    assert "\r" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 2


class Structure(HTMLParser):
    """Checks that elements are closed in order; collects text and what would be loaded."""

    VOID = ("meta", "path", "use", "rect", "circle")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        names = ("src", "href", "xlink:href")
        self.loads += [value or "" for name, value in attrs if name in names]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_has_verdict_numbers_and_picture_and_loads_nothing() -> None:
    pytest.importorskip("matplotlib")

    ranks = (rank_result(0, host="<node & a>"), rank_result(1))
    whole = results(gradring=ranks)
    text = page(whole, checks(whole), None)
    found = Structure(text)
    assert all(target.startswith("#") for target in found.loads)
    assert "url(" not in text.replace("url(#", "")
    assert "<script" not in text
    said = " ".join(" ".join(found.text).split())
    # The verdict comes first, then the numbers.
    places = [said.index(part) for part in ("All 3 checks passed", "9.00 ms", "18.00 ms", "0.980")]
    assert places[:2] == sorted(places[:2])
    assert "<node & a>" in said
    for rank in whole.gradring:
        assert rank.weights_hash in said
    assert "with care" not in said
    busy = results(others={"gradring": 0.4})
    assert "gradring 40%" in page(busy, checks(busy), None)
    # The picture takes the page's colours, light and dark.
    assert "currentColor" in text and "var(--ground)" in text
    assert INK not in text and PAPER not in text


def test_the_page_of_a_demo_that_went_wrong_says_so() -> None:
    pytest.importorskip("matplotlib")

    failed = [Check(True, "Good."), Check(False, "Bad.")]
    text = page(results(mirrored=()), failed, "it never ended")
    said = " ".join(" ".join(Structure(text).text).split())
    assert "1 of 2 checks failed" in said
    assert "no comparison with MultiWorkerMirroredStrategy: it never ended" in said


@pytest.mark.parametrize("with_mirrored", [True, False])
def test_the_picture_is_drawn_with_and_without_the_comparison(
    tmp_path: Path, with_mirrored: bool
) -> None:
    pytest.importorskip("matplotlib")
    whole = results() if with_mirrored else results(mirrored=())
    assert draw(whole, tmp_path).stat().st_size > 20_000
