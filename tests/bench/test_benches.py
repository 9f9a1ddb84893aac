"""The programs in ``benches/``: each runs, at sizes that say nothing about speed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from benches import again, simulated_choice
from benches.model_steps import recorded_steps
from benches.tables import LINES, MANY, RANGES, RATIOS, STEPS, Recorded, rewritten

from gradring import build_info
from gradring.tools.bench.comparison import comparisons
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.table import format_ratio
from support.chosen import marked

ROOT = Path(__file__).parents[2]
STEPS_RECORD = ROOT / "benches" / "results" / "model-steps.json"
RULES_RECORD = ROOT / "benches" / "results" / "update-rules.json"
PAGE = ROOT / "docs" / "performance.md"


def run(program: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Ends with this exit code."""
    paths = [str(ROOT), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", f"benches.{program}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def made_by_make_bench(*records: str) -> str:
    dry = ["make", "--dry-run", "bench", *([f"RECORDS={' '.join(records)}"] if records else [])]
    return subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def measurements() -> list[dict[str, object]]:
    systems = [("gradring", "tcp"), ("mpi", "shm"), ("something new", "ether"), ("link", "tcp")]
    systems += [("gloo", "tcp"), ("tensorflow-raw", "grpc")]
    return [
        asdict(
            Measurement.of(
                [size * 1e-9 + 1e-5] * (size >> 20 or 1),
                cpu_s=1e-3,
                system=system,
                transport=transport,
                algorithm="ring",
                world_size=2,
                dtype="float32",
                size_bytes=size,
                wrong=0,
            )
        )
        for size in (4, 1 << 20, 100 << 20)
        for system, transport in systems
    ]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_measurements_become_a_picture(tmp_path: Path) -> None:
    source, picture = tmp_path / "measured.json", tmp_path / "images" / "all-reduce.png"
    source.write_text(
        json.dumps([row | {"command": "gradring", "versions": "today"} for row in measurements()])
    )
    run("plot", source, picture)
    header = picture.read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header[1:4] == b"PNG" and width > 1500 and height > 600


@pytest.mark.parametrize(
    "content", ['[{"model": "cnn"}]', '{"date": "today"}', '{"measurements": [{"model": "cnn"}]}']
)
def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    source = tmp_path / "other.json"
    source.write_text(content)
    done = run("plot", source, tmp_path / "none.png", code=1)
    assert done.stderr.endswith("has no measurements of gradring bench all-reduce\n")
    assert len(done.stderr.splitlines()) == 1


def test_the_page_has_the_tables_of_the_records(tmp_path: Path) -> None:
    copy = tmp_path / PAGE.name
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| 2 x 1 |")]
    copy.write_text(PAGE.read_text().replace(rows[0], "| 2 x 1 | 1 us |"))
    run("tables", copy)
    command = f"python -m benches.tables {PAGE.relative_to(ROOT)}"
    assert copy.read_text() == PAGE.read_text(), f"run: {command}"
    assert str(PAGE.relative_to(ROOT)) in made_by_make_bench()


def test_a_table_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="there is no table of medians"):
        rewritten("<!-- table of run.json: medians -->\n\n| old |\n", tmp_path)


def test_the_block_of_an_output_is_written_anew_from_its_record(tmp_path: Path) -> None:
    rows = [row | {"command": "pytest benches", "versions": "today"} for row in measurements()]
    (tmp_path / "run.json").write_text(json.dumps(rows))
    page = "one\n\n<!-- output of run.json -->\n\n```text\nold\n```\n\n```text\nkept\n```\n"
    head, block, rest = rewritten(page, tmp_path).split("```", 2)
    assert head == page.partition("```")[0] and rest.endswith("```text\nkept\n```\n")
    assert block.startswith("text\nLike with like") and "old" not in block
    assert len(re.findall(r"100 MiB .* gloo .*x$", block, re.MULTILINE)) == 1


def test_the_readme_has_the_output_of_the_record() -> None:
    readme = (ROOT / "README.md").read_text()
    assert rewritten(readme) == readme, "run: python -m benches.tables README.md"


def test_the_pages_show_all_that_was_recorded() -> None:
    page = PAGE.read_text() + (ROOT / "README.md").read_text()
    paths = set((ROOT / "benches" / "results").glob("*.json"))
    for several, kind in (("network", LINES), ("ranks", MANY)):
        assert f"<!-- table of benches/results/{several}-*.json: {kind} -->" in page
        paths -= set((ROOT / "benches" / "results").glob(f"{several}-*.json"))
    assert f"<!-- table of benches/results/{STEPS_RECORD.name}: {STEPS} -->" in page
    for path in paths - {RULES_RECORD, STEPS_RECORD}:
        name = f"benches/results/{path.name}"
        marks = (f"output of {name}", f"table of {name}: {RATIOS}", f"table of {name}: {RANGES}")
        assert any(f"<!-- {mark} -->" in page for mark in marks), name


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_trainings_become_pictures_and_the_table_of_their_page(tmp_path: Path) -> None:
    page, copy = ROOT / "docs" / "choosing-an-update-rule.md", tmp_path / "choosing.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `diloco` |")]
    copy.write_text(page.read_text().replace(rows[0], "| `diloco` | 1 s |"))
    run("plot_rules", RULES_RECORD, copy)
    assert copy.read_text() == page.read_text(), "run: python -m benches.plot_rules RECORD PAGE"
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    assert drawn and all(f"](images/{name})" in page.read_text() for name in drawn)


def test_the_readme_has_the_ranges_of_the_record() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Speed\n")[2].partition("\n## ")[0]
    bullets = re.findall(r"^\* (.*(?:\n  .*)*)", section, re.MULTILINE)
    recorded = Recorded.read(ROOT / "benches" / "results" / "all-reduce.json")
    ranges = recorded.ranges(comparisons(recorded.measurements)).values()
    p50s, _, p99s = (list(column) for column in zip(*ranges, strict=True))
    said = re.findall(r"[\d.]+ to [\d.]+", " ".join(" ".join(bullets).split()))
    assert sorted(said) == sorted(p50s + p99s)


def test_the_readme_has_the_ranges_of_training_steps() -> None:
    times = [row.p50_ms for row in recorded_steps(STEPS_RECORD) if row.program == "loop"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(r"MWMS it takes (.+?) times as .* and with gradring (.+?) times as", readme)
    assert said is not None
    pairs = (("MWMS", "gradring"), ("gradring", "apart"))
    for text, (over, under) in zip(said.groups(), pairs, strict=True):
        ratios = [each[over] / each[under] for each in times]
        assert text == " to ".join(format_ratio(f(ratios)).rstrip("x") for f in (min, max))


def test_the_record_says_with_which_congestion_control_it_was_made() -> None:
    record = json.loads((ROOT / "benches" / "results" / "all-reduce.json").read_text())[0]
    assert record["date"] and record["machine"] and record["tcp_congestion_control"] == "reno"
    lines = PAGE.read_text().splitlines()
    commands = [line for line in lines if line.startswith("gradring bench all-reduce")]
    (documented,) = (line for line in commands if line.endswith(" --congestion reno"))
    assert set(documented.split()) <= set(record["command"].split())


def test_records_are_measured_again_by_their_commands(tmp_path: Path) -> None:
    asked = ["all-reduce", "ranks-*"]
    names = [path.stem for path in again.chosen(asked)]
    assert names == ["all-reduce", "ranks-08", "ranks-16", "ranks-32", "ranks-64"]
    with pytest.raises(ValueError, match="has no record 'mars'; it has all-reduce, "):
        again.chosen(["mars"])
    # Every record has a command, and the option by which it is written.
    for record in again.chosen(["*"]):
        assert again.command_of(record, tmp_path / "new.json")[-1] == str(tmp_path / "new.json")
    assert "benches.again 'all-reduce' 'ranks-*'\n" in made_by_make_bench(*asked)
    assert "has no record 'mars'" in run("again", "mars", code=1).stderr


def test_a_record_stays_if_it_cannot_be_measured(tmp_path: Path) -> None:
    def measured(name: str, options: str) -> tuple[bool, list[dict[str, object]]]:
        record = tmp_path / f"{name}.json"
        record.write_text(json.dumps([{"command": f"gradring bench all-reduce {options}"}]))
        return again.measure(record), json.loads(record.read_text())

    small = "--world-size 2 --sizes 4B --transport tcp --iterations 2 --allow-debug"
    done, (row,) = measured("small", small)
    assert done and row["bytes"] == 4
    done, (row,) = measured("wrong", "--world-size pigeons")
    assert not done and row == {"command": "gradring bench all-reduce --world-size pigeons"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.json", "wrong.json"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
@pytest.mark.skipif(build_info()["debug"], reason="a debug build is not measured")
def test_the_smallest_size_is_measured_to_the_table_and_the_record(tmp_path: Path) -> None:
    path = tmp_path / "results" / "record.json"
    options = ("-k", "4B", "--record", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benches", "-q", *options],
        cwd=ROOT,
        # pytest-benchmark measures nothing where it finds itself beside other tests.
        env={name: it for name, it in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    groups = re.findall(r"benchmark 'all-reduce 4 B, (.*)': (\d) tests", done.stdout)
    assert sorted(groups) == [("TensorFlow op", "2"), ("strategy", "2")]
    names = ["gradring-op", "tensorflow-raw", "gradring-strategy", "tensorflow-strategy"]
    table, _, end = done.stdout.partition(" p50, p90 and p99 ")[2].partition("recorded in ")
    assert end.startswith(str(path))
    row = r"^ +4 B .* over TCP +(\S+)(?: +[\d.]+ [mu]s){3}((?: +[\d.]+x)*)$"
    shown = re.findall(row, table, re.MULTILINE)
    assert [(name, len(ratios.split())) for name, ratios in shown] == list(
        zip(names, (0, 3, 0, 3), strict=True)
    )
    rows = json.loads(path.read_text())
    assert [row["system"] for row in rows] == names
    assert all(row["wrong"] == 0 and row["p99_us"] and row["cpu_s_per_gb"] > 0 for row in rows)
    assert {row["command"] for row in rows} == {f"pytest benches -q {' '.join(options)}"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_training_steps_reach_the_same_weights_in_all_ways(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    arguments = ("--models", "mlp-1m", "--batch", "4", "--programs", "loop", "--threads", "1")
    counts = ("--rounds", "1", "--steps", "1", "--allow-debug")
    run("model_steps", *arguments, *counts, "--json", path)
    (row,) = json.loads(path.read_text())
    assert (row["model"], row["threads"], row["steps"]) == ("mlp-1m", "1", 1)
    assert 950_000 < row["parameters"] < 1_050_000
    assert list(row["p50_ms"]) == ["alone", "apart", "one rank", "gradring", "MWMS"]
    assert all(value > 0 for value in row["p50_ms"].values())
    # Of one step each.
    assert row["p90_ms"] == row["p50_ms"] and row["p99_ms"] == {}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_steps_of_models_are_recorded_by_what_they_consist_of(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    arguments = ("--models", "embedding", "--threads", "default", "--rounds", "1", "--steps", "2")
    run("model_steps", *arguments, "--allow-debug", "--json", path)
    loop, fit = json.loads(path.read_text())
    assert (loop["program"], fit["program"], fit["threads"]) == ("loop", "fit", "default")
    assert [*loop["p50_ms"]] == ["alone", "apart", "one rank", "gradring", "MWMS"]
    assert [*fit["p90_ms"]] == ["alone", "apart", "one rank", "gradring"]
    for row in (loop, fit):
        assert row["parameters"] == 6_404_810 and row["collectives"] >= 4
        assert min(row["waits_ms"], row["moves_ms"], row["exposed_ms"], *row["p50_ms"].values()) > 0


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("tensorflow", "keras", "sklearn"))),
    reason="needs TensorFlow, Keras and scikit-learn",
)
def test_update_rules_are_recorded_by_time_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    rules = ("all-reduce", "asynchronous")
    arguments = ("--situations", "equal", "--rules", ",".join(rules), "--seeds", "1")
    run("update_rules", path, *arguments, "--steps", "8")
    trainings = json.loads(path.read_text())["equal"]["trainings"]
    assert tuple(row["rule"] for row in trainings) == rules
    for row in trainings:
        assert all(len(row[name]) == 2 for name in ("seconds", "losses", "accuracies"))
        assert 0 < row["megabytes"][0] < row["megabytes"][1]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_ring_in_c_sums_as_gradring_does(ranks: int) -> None:
    done = run("c_ring", "--sizes", "4000", "--rounds", "1", "--ranks", ranks)
    assert re.search(r"^ +4000 B C, blocks .* gradring / it", done.stdout, re.MULTILINE)


@pytest.mark.usefixtures("simulated_hosts_are_possible")
def test_a_limited_network_bounds_the_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    arguments = ("--rate", "100mbit", "--sizes", "2MiB", "--iterations", "1")
    run("limited_network", *arguments, "--json", path)
    exact, narrow = json.loads(path.read_text())
    assert (exact["wire_dtype"], narrow["wire_dtype"]) == ("float32", "bfloat16")
    assert exact["wrong"] == 0 and exact["share_of_line"] > 0
    assert narrow["refused"] or narrow["wrong"] == 0


@pytest.mark.usefixtures("simulated_hosts_are_possible")
def test_connections_are_limited_and_several_streams_measured(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    arguments = ("--rate", "1gbit", "--flow-rate", "100mbit", "--streams", "1,2", "--sizes", "2MiB")
    done = run("limited_network", *arguments, "--iterations", "1", "--json", path)
    assert "connections of 100mbit = 0.0125 GB/s" in done.stdout
    rows = json.loads(path.read_text())
    assert [row["streams"] for row in rows] == [1, 1, 2, 2]
    assert all(row["wrong"] == 0 and row["busbw_gbps"] > 0 for row in rows)


@pytest.mark.usefixtures("simulated_hosts_are_possible")
def test_reducing_inside_hosts_first_sends_less_between_them(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    arguments = ("--ranks-per-host", "2", "--algorithms", "direct,hierarchical")
    run("limited_network", *arguments, "--sizes", "2MiB", "--iterations", "1", "--json", path)
    rows = {(row["algorithm"], row["wire_dtype"]): row for row in json.loads(path.read_text())}
    # For each byte of the buffer: 2(H-1)/H for each rank of a host, or for the host.
    assert rows["direct", "float32"]["crossed"] == pytest.approx(2.0, rel=0.1)
    assert rows["hierarchical", "float32"]["crossed"] == pytest.approx(1.0, rel=0.1)


def test_a_rate_that_tc_would_not_take_is_refused() -> None:
    done = run("limited_network", "--rate", "fast", code=2)
    assert "'fast' is no rate; write it as 1gbit or 500mbit" in done.stderr


@pytest.mark.parametrize(
    "layout",
    [
        *((12, 1), (16, 4), (64, 1), (65, 1), (96, 8)),
        pytest.param((1024, 8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_auto_is_simulated_to_be_near_the_best_algorithm(layout: tuple[int, int]) -> None:
    for size, chosen, took_s, best, best_s in simulated_choice.compare(
        *layout, [4096, 256 << 10, 4 << 20]
    ):
        assert took_s <= 1.2 * best_s, (size, chosen, best)


#: After what the last line says.
END = r".*\n\Z"
#: Those that have no test of their own, at their smallest, with what they print.
PROGRAMS: dict[str, tuple[tuple[object, ...], list[str]]] = {
    "compressed_updates": (("--size", "4MiB", "--rounds", 1), [f"PowerSGD{END}"]),
    "sharded_updates": (("--size", "4MiB", "--rounds", 1), [f"Sharded{END}"]),
    "gradient_check": (("--width", 64, "--layers", 2), [f"ratio{END}"]),
    "graph_reductions": (
        ("--sizes", "4", "--rounds", 1, "--transport", "tcp"),
        [r"^tcp +4 B +array .* in a graph "],
    ),
    "local_ranks": (
        ("--ranks", "2,3", "--rounds", 1, "--calls", 10),
        [r"^\| 2( \| [\d.]+){6} \|$", r"^\| 3 \| "],
    ),
    "monitor_overhead": ((), ["of a step of 1 ms"]),
    "overlap": (("--batch", 8, "--rounds", 1), [f"hidden_share_of_possible{END}"]),
    "parameter_server_steps": (
        ("--model", "small", "--rounds", 1),
        [r"^gradring .* steps/s.*\nTensorFlow .* steps/s", r"^hidden: "],
    ),
    "parameter_servers": ((), [f"shared memory takes{END}"]),
    "point_to_point": (
        ("--rounds", 1, "--sizes", "4,4096", "--transport", "tcp"),
        [rf"^tcp 4 {unit}: send .* / .*; broadcast .* / " for unit in ("B", "KiB")],
    ),
    "simulated_choice": (("--sizes", "4"), [f"cases, at most{END}"]),
    "simulated_times": (("--sizes", "1MiB", "--iterations", 1), [f"median{END}"]),
    "sparse_gradients": (("--ranks", 2, "--rounds", 1), [f"40%   100%{END}"]),
    "start_up": (
        ("--ranks", 2, "--transports", "tcp", "--rounds", 1),
        [r"^import gradring: \d+ ms$", r"^2 ranks over tcp: forming [\d.]+ s, all [\d.]+ s$"],
    ),
}
#: Those that take seconds, and need no TensorFlow.
QUICK = ("local_ranks", "monitor_overhead", "point_to_point", "start_up")
ON_SIMULATED_HOSTS = ("compressed_updates", "simulated_times")


@pytest.mark.parametrize("program", marked(PROGRAMS, QUICK))
def test_a_program_prints_what_it_measures(program: str, request: pytest.FixtureRequest) -> None:
    if program not in QUICK and importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    if program in ON_SIMULATED_HOSTS:
        request.getfixturevalue("simulated_hosts_are_possible")
    arguments, said = PROGRAMS[program]
    done = run(program, *arguments)
    for pattern in said:
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
def test_models_with_embeddings_are_measured_by_rows_and_by_sums() -> None:
    pytest.importorskip("tensorflow")
    done = run("sparse_gradients", "--models", "--ranks", 2, "--rounds", 1)
    for model in ("text", "pairs"):
        for way in ("rows", "sum"):
            assert re.search(rf"^{model} +{way} +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)


def test_every_program_is_run_by_a_test() -> None:
    sources = {path.stem: path.read_text() for path in (ROOT / "benches").glob("*.py")}
    programs = {name for name, source in sources.items() if '__name__ == "__main__"' in source}
    run_here = set(re.findall(r'run\(\s*"(\w+)"', Path(__file__).read_text()))
    # Rank 1 of `pytest benches`.
    assert programs - run_here - {*PROGRAMS} == {"peer_rank"}
