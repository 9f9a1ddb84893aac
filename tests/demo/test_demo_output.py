"""The demo's results as text, and its line of progress."""

import io
from pathlib import Path

import pytest
from made_up import rank_result, results

from gradring.demo import tables
from gradring.demo.picture import draw
from gradring.demo.progress import Progress
from gradring.demo.verdict import Check

LINE = "[1] epoch 3/20 step 41 loss 0.5000 4321 samples/s\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_table_has_a_row_per_rank_whose_parts_add_up() -> None:
    ranks = [rank_result(0), rank_result(1, host="a-host-with-a-long-name")]
    header, first, second, *_ = tables.rank_table(ranks).splitlines()
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
    text = tables.rank_table([rank_result()])
    for name, meaning in tables.COLUMNS:
        assert f"{name:<14} {meaning}" in text


def test_bars_are_as_long_as_the_steps() -> None:
    lines = tables.bars(results(), unicode=False).splitlines()
    bars = {" ".join(line.split()[:-3]): line.split()[-1] for line in lines[1:6]}
    assert bars["gradring rank 0"] == "#" * 17 + "=" * 2 + "." * 6
    assert len(bars["MultiWorkerMirrored rank 1"]) == tables.BAR_WIDTH
    assert bars["MultiWorkerMirrored rank 1"].count("=") == 36
    assert set(bars["single process"]) == {"#"}


def test_the_comparison_states_the_ratio_and_no_speed_up() -> None:
    said = " ".join(tables.comparison(results(), None).split())
    assert "takes 18.00 ms per step" in said
    assert "a ratio of 2.0" in said
    assert "72% and 44%" in said
    assert "the same hash" in said
    assert "share this machine's 2 cores" in said
    assert "ratio of 0.89 shows overhead, not scaling" in said


def test_a_busy_machine_is_mentioned_and_an_idle_one_is_not() -> None:
    assert "with care" not in tables.comparison(results(), None)
    busy = {"gradring": 0.4, "single process": 0.0}
    said = " ".join(tables.comparison(results(others=busy), None).split())
    assert "with care" in said
    assert "gradring 40%, single process 0%" in said


def test_a_missing_comparison_is_explained() -> None:
    said = tables.comparison(results(mirrored=()), "it never ended")
    assert "no comparison with MultiWorkerMirroredStrategy: it never ended" in said
    assert tables.bars(results(mirrored=()), unicode=True).count("MultiWorkerMirrored") == 0


def test_failed_checks_stand_out() -> None:
    text = tables.verdict([Check(True, "Good."), Check(False, "Bad.")])
    assert text.splitlines() == ["passed  Good.", "FAILED  Bad."]


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    progress = Progress("gradring", 2, stream, unicode=False)
    progress.feed(LINE)
    progress.feed(LINE.replace("[1]", "[0]").replace("step 41", "step 40"))
    progress.feed("[0] something else that a rank prints\n")
    assert stream.getvalue().count("\n") == 0
    shown = stream.getvalue().rpartition("\r")[2]
    assert "###................. epoch 3/20 step 41 loss 0.5000" in shown
    progress.finish("done")
    assert stream.getvalue().endswith("done\n")


def test_elsewhere_lines_are_plain_and_rare() -> None:
    stream = io.StringIO()
    progress = Progress("gradring", 2, stream, unicode=False)
    for _ in range(50):
        progress.feed(LINE)
    progress.finish("done")
    assert "\r" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize("with_mirrored", [True, False])
def test_the_picture_is_drawn_with_and_without_the_comparison(
    tmp_path: Path, with_mirrored: bool
) -> None:
    pytest.importorskip("matplotlib")
    whole = results() if with_mirrored else results(mirrored=())
    assert draw(whole, tmp_path).stat().st_size > 20_000
