"""``gradring simulate``: what it accepts and writes; its arithmetic is tested in the core."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradring.machine import packages
from gradring.tools.bench.options import ALGORITHMS
from gradring.tools.cli import main
from gradring.tools.simulate import simulation
from gradring.tools.simulate.options import parse_world_sizes
from support.documents import ROOT

NETWORK_KEYS = [
    "latency_s",
    "bytes_per_s",
    "local_latency_s",
    "local_bytes_per_s",
    "hosts_per_rack",
    "uplink_bytes_per_s",
    "cores",
    "message_s",
    "copy_s_per_byte",
    "fold_s_per_byte",
    "stragglers",
]
KEYS = [
    "collective",
    "splits",
    "world_size",
    "ranks_per_host",
    "bytes",
    "wanted",
    "algorithm",
    "time_us",
    "first_us",
    "busbw_gbps",
    "bandwidth_bound_us",
    "latency_bound_us",
    "busiest_line",
    "busiest_rank",
    "pieces",
    "network",
]
#: Nothing but lines and latency takes time.
ONLY_LINES = ("--message-cost", "0s", "--copy-rate", "999999gbit", "--fold-rate", "999999gbit")


def simulated(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "simulated.json"
    assert main(["simulate", "--json", str(path), *arguments]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    assert all(list(row) == KEYS and list(row["network"]) == NETWORK_KEYS for row in rows)
    return rows


def test_each_number_of_ranks_size_and_algorithm_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, sizes = ("auto", "ring"), (4096, 1 << 20)
    several = ("--world-size", "2..8", "--sizes", "4KiB,1MiB", "--algorithm", ",".join(names))
    rows = simulated(tmp_path, *several)
    asked = [(row["world_size"], row["bytes"], row["wanted"]) for row in rows]
    assert asked == [(n, size, name) for n in (2, 4, 8) for size in sizes for name in names]
    assert {row["algorithm"] for row in rows if row["wanted"] == "auto"} > {"ring"}
    assert all(row["time_us"] >= row["bandwidth_bound_us"] for row in rows)
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "# all_reduce"
    assert "between hosts 20 us, 10 Gbit/s each way" in output[1]
    assert len(output) == 4 + len(rows)


def test_the_page_explains_every_column() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.partition("| column | meaning |\n")[2].partition("\n\n")[0]
    explained = re.findall("`([^`]+)`", "".join(re.findall(r"^\|[^|]*\|", table, re.MULTILINE)))
    assert explained == [title for title, *_ in simulation._COLUMNS]


def test_a_ring_takes_its_steps(tmp_path: Path) -> None:
    given = ("--latency", "10us", "--bandwidth", "8gbit", "--algorithm", "ring", *ONLY_LINES)
    (row,) = simulated(tmp_path, "--world-size", "16", "--sizes", "64KiB", *given)
    assert row["time_us"] == pytest.approx(30 * (10 + 4.096), rel=1e-3)
    assert row["bandwidth_bound_us"] == pytest.approx(30 * 4.096)
    assert row["latency_bound_us"] == pytest.approx(40)
    assert row["pieces"] == 16 * 30


def test_an_all_to_all_takes_the_bytes_that_its_splits_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--collective", "all_to_all", "--latency", "10us", "--bandwidth", "8gbit", *ONLY_LINES)
    several = ("--world-size", "4", "--sizes", "64KiB", *given)
    (even,) = simulated(tmp_path, *several)
    assert (even["collective"], even["splits"], even["algorithm"]) == ("all_to_all", [1], "direct")
    # Each line carries three of four parts, and nothing more: that is the bound, too.
    assert even["bandwidth_bound_us"] == pytest.approx(3 * 16.384)
    assert even["time_us"] == pytest.approx(10 + 3 * 16.384, rel=1e-3)
    assert even["busbw_gbps"] == pytest.approx(3 * 16.384 / (10 + 3 * 16.384), rel=1e-3)
    (one,) = simulated(tmp_path, *several, "--splits", "0,0,1,0")
    assert (one["splits"], one["pieces"]) == ([0, 0, 1, 0], 3)
    assert one["bandwidth_bound_us"] == pytest.approx(3 * 65.536)
    assert one["time_us"] == pytest.approx(10 + 3 * 65.536, rel=1e-3)
    (uneven,) = simulated(tmp_path, *several, "--splits", "3,1")
    # A rank with three of eight parts gets them from three others.
    assert uneven["time_us"] == pytest.approx(10 + 3 * 3 / 8 * 65.536, rel=1e-3)
    assert "# all_to_all, splits 3,1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("common", "slower"),
    [
        ((), ("--straggler", "3:4")),
        ((), ("--uplink", "1gbit", "--hosts-per-rack", "2")),
        (("--ranks-per-host", "4"), ("--cores", "1")),
        ((), ("--message-cost", "30us")),
        ((), ("--copy-rate", "1gbit")),
        ((), ("--fold-rate", "1gbit")),
        (("--collective", "all_to_all", "--algorithm", "auto"), ("--splits", "5,1,1,1")),
        (("--collective", "all_to_all", "--algorithm", "auto"), ("--straggler", "3:4")),
    ],
)
def test_whatever_is_slower_takes_longer(
    tmp_path: Path, common: tuple[str, ...], slower: tuple[str, ...]
) -> None:
    common = ("--world-size", "8", "--sizes", "1MiB", "--algorithm", "ring", *common)
    (plain,) = simulated(tmp_path, *common)
    (slow,) = simulated(tmp_path, *common, *slower)
    assert slow["time_us"] > 1.2 * plain["time_us"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (("--world-size", "1"), "not within 2 to 65536"),
        (("--world-size", "8..4"), "in growing order"),
        (("--world-size", "many"), "write 8, 2,4,8 or 16..4096"),
        (("--latency", "20"), "write it as 25us"),
        (("--bandwidth", "10GB"), "write it as 1gbit"),
        (("--straggler", "1"), "write RANK:FACTOR as 3:2.5"),
        (("--straggler", "1:0.5"), "a factor of at least 1"),
        (("--straggler", "64:2"), "ranks run from 0 to 1"),
        (("--algorithm", "rings"), "known: auto, ring"),
        (("--sizes", "6"), "multiples of 4"),
        (("--ranks-per-host", "3"), "multiple of --ranks-per-host"),
        (("--uplink", "10gbit"), "--uplink 40gbit --hosts-per-rack 8"),
        (("--cores", "0"), "at least 1"),
        (("--cores", "9" * 18), "is more than 65536 ranks could use"),
        (("--cores", "9" * 23), "cores are too many"),
        (("--hosts-per-rack", "9" * 18, "--uplink", "1gbit"), "is more than 65536 ranks"),
        (("--latency", "9" * 20 + "s"), "takes more than half a year there; check the units"),
        (("--sizes", "1GiB", "--fold-rate", "0.000000001gbit"), "more than half a year"),
        (("--bandwidth", "9" * 400 + "gbit"), "write it as 1gbit"),
        (("--stragler", "1:2"), "did you mean --straggler?"),
        (("--collective", "all_too_all"), "did you mean all_to_all?"),
        (("--collective", "all_to_all", "--algorithm", "ring"), "all_to_all needs direct"),
        (("--splits", "1,2"), "--splits is for --collective all_to_all"),
        (("--collective", "all_to_all", "--splits", "1,-2"), "write relative sizes such as 3,1"),
        (("--collective", "all_to_all", "--splits", "1,,2"), "write relative sizes such as 3,1"),
        (("--collective", "all_to_all", "--splits", "1_0,\u0663"), "write relative sizes"),
        (("--collective", "all_to_all", "--splits", "9999999"), "each at most 1000000"),
        (("--collective", "all_to_all", "--splits", "0,0,1"), "nothing to any of 2 ranks"),
        (("--algorithm", "hierarchical"), "needs several hosts"),
        (("--world-size", "4096", "--algorithm", "ring", "--sizes", "10000000000"), "choose fewer"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_type(
    wrong: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["simulate", *wrong])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err


def test_what_cannot_be_simulated_is_left_out_and_the_rest_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("--algorithm", "hierarchical,star")
    rows = simulated(tmp_path, "--world-size", "4", "--sizes", "4", *names)
    assert [row["algorithm"] for row in rows] == ["star"]
    assert "# left out: hierarchical, 4 ranks" in capsys.readouterr().out


def test_all_algorithms_of_the_core_can_be_simulated(tmp_path: Path) -> None:
    names = ",".join(ALGORITHMS[1:])
    several = ("--world-size", "8", "--ranks-per-host", "2", "--sizes", "1MiB")
    rows = simulated(tmp_path, *several, "--algorithm", names)
    assert [row["algorithm"] for row in rows] == list(ALGORITHMS[1:])


def test_a_picture_shows_time_over_ranks(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "ranks.png"
    assert main(["simulate", "--world-size", "2..16", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_what_draws_it_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "missing", list)
    picture = tmp_path / "ranks.png"
    assert main(["simulate", "--world-size", "2", "--picture", str(picture)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"gradring simulate: --picture needs matplotlib; type: {packages.advice(['matplotlib'])}, "
        "or omit --picture\n"
    )
    assert not picture.exists()


def test_where_nothing_costs_anything_no_time_passes(tmp_path: Path) -> None:
    free = ("--latency", "0s", "--bandwidth", "999999gbit", *ONLY_LINES)
    (row,) = simulated(tmp_path, "--world-size", "2", "--sizes", "4", *free)
    assert (row["time_us"], row["busbw_gbps"]) == (0, 0)


def test_numbers_of_ranks_double_or_are_listed() -> None:
    assert parse_world_sizes("16..100") == (16, 32, 64)
    assert parse_world_sizes("2,4,4..8") == (2, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", ["1", "8"])
def test_4096_ranks_and_100_mib_take_less_than_2_gib(ranks_per_host: str) -> None:
    limit = 2 << 30
    command = [sys.executable, "-m", "gradring", "simulate", "--world-size", "4096"]
    subprocess.run(
        [*command, "--sizes", "4KiB,1MiB,100MiB", "--ranks-per-host", ranks_per_host],
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
