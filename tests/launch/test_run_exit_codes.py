"""Exit codes of ``gradring run``, and what it says last."""

import os
import re
from pathlib import Path

import pytest
from launching import IN_A_GROUP, gradring, python_path, script, script_of_first
from situations import ABOVE

from gradring.launch.report import Blame, blame_left, blame_printed, first_cause, last_words
from gradring.launch.tracing import merge
from gradring.records.paths import part_of
from support.commands import succeeded

SLEEP = "time.sleep(300)\n"


def test_success_of_all_ranks_is_success(tmp_path: Path) -> None:
    done = gradring("run", "-np", 3, *script(tmp_path, f"{IN_A_GROUP}print('fine')"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] fine", "[1] fine", "[2] fine"]


@pytest.mark.parametrize("last", ["", "sys.exit(3 * (rank == 0))", IN_A_GROUP])
def test_ranks_that_ended_well_without_a_group_are_told_that_they_were_alone(
    tmp_path: Path, last: str
) -> None:
    done = gradring("run", "-np", 2, *script(tmp_path, f"import gradring\n{last}"))
    said = "no rank joined a group, so each of the 2 processes ran alone, unless they met without"
    assert (said in done.stderr) == (not last)


def test_ranks_alone_in_spite_of_a_given_strategy_are_told_the_reason(tmp_path: Path) -> None:
    done = gradring("run", "-np", 2, "--with-strategy", *script(tmp_path, "print('alone')"))
    assert "no rank joined a group" in done.stderr
    assert "add --with-strategy" not in done.stderr
    assert "models of Keras that the program makes in no strategy" in done.stderr


@pytest.mark.parametrize(
    ("body", "is_told"),
    [
        ("comm = gradring.init()", True),
        ("with gradring.init(): pass", True),
        ("comm = gradring.init()\ncomm.barrier()", False),
        ("comm = gradring.init()\ncomm.split(0).all_reduce(1)", False),
        ("comm = gradring.init(world_size=1, rank=0)", False),
    ],
)
def test_a_group_that_did_nothing_together_is_told(
    tmp_path: Path, body: str, is_told: bool
) -> None:
    done = gradring("run", "-np", 2, *script(tmp_path, f"import gradring\n{body}"))
    said = "2 ranks formed a group and did no collective in it: each did all of its work alone"
    assert done.stderr.count(said) == is_told, done.stderr


def test_a_single_rank_is_not_told_that_it_is_alone(tmp_path: Path) -> None:
    done = gradring("run", "-np", 1, *script(tmp_path, ""))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_separator_before_the_command_may_be_left_out(tmp_path: Path) -> None:
    program = script(tmp_path, "print(sys.argv[1:])")
    for separator in ([], ["--"]):
        done = gradring("run", "-np", 1, *separator, *program, "--lr", "1", "--", "-np")
        assert done.stdout == "[0] ['--lr', '1', '--', '-np']\n"


def test_a_module_is_run_like_python_does(tmp_path: Path) -> None:
    script(tmp_path, "print(__name__, sys.argv[1:])")
    search = {"PYTHONPATH": python_path(tmp_path)}
    done = gradring("run", "-np", 1, "-m", "train", "-m", "x", **search)
    assert done.stdout == "[0] __main__ ['-m', 'x']\n", done.stderr


def test_the_first_failing_ranks_exit_code_is_returned(tmp_path: Path) -> None:
    program = script_of_first(
        tmp_path,
        "if rank == 1:\n    note_first()\n    sys.exit(7)\n"
        "until_first_was_collected()\nsys.exit(9)\n",
    )
    done = gradring("run", "-np", 3, "--grace", 30, *program)
    assert done.returncode == 7
    assert "rank 1 on " in done.stderr and "failed first (exit code 7)" in done.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", 137), ("SIGSEGV", 139)])
def test_a_rank_killed_by_a_signal_gives_128_plus_its_number(
    tmp_path: Path, name: str, code: int
) -> None:
    program = script(tmp_path, f"if rank == 0: os.kill(os.getpid(), signal.{name})\n{SLEEP}")
    done = gradring("run", "-np", 2, "--grace", 1, *program)
    assert done.returncode == code
    assert f"failed first (killed by {name})" in done.stderr


def test_survivors_have_time_to_report_their_own_errors(tmp_path: Path) -> None:
    program = script_of_first(
        tmp_path,
        "if rank == 0:\n    note_first()\n    sys.exit(3)\n"
        "until_first_was_collected()\n"
        "time.sleep(0.7)\nprint('I lost rank 0', flush=True)\nsys.exit(4)\n",
    )
    done = gradring("run", "-np", 2, "--grace", 30, *program)
    assert (done.returncode, done.stdout) == (3, "[1] I lost rank 0\n")


@pytest.mark.slow
def test_survivors_get_sigterm_and_then_sigkill(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: print('told to end', flush=True))\n"
        f"ready = {str(tmp_path / 'ready')!r}\n"
        "if rank == 0:\n"
        "    while not os.path.exists(ready): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "open(ready, 'w').close()\n"
        "while True: time.sleep(1)\n",
    )
    done = gradring("run", "-np", 2, "--grace", 8, *program)
    assert done.returncode == 3
    assert "[1] told to end\n" in done.stdout


def test_the_first_failing_ranks_traceback_comes_last(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "def layer():\n    raise ValueError('no such layer')\n"
        "def model():\n"
        "    try: layer()\n"
        "    except ValueError as error: raise KeyError('model') from error\n"
        "if rank == 1: model()\n"
        "time.sleep(0.7)\nprint('noise', file=sys.stderr)\n",
    )
    done = gradring("run", "-np", 2, "--grace", 30, *program)
    before, _, last = done.stderr.rpartition("gradring run: ")
    header, *lines = last.splitlines()
    assert "[0] noise" in before
    assert header.startswith("rank 1 on ") and "failed first (exit code 1)" in header
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert "[1] ValueError: no such layer" in lines
    assert lines[-1] == "[1] KeyError: 'model'"


def script_of_blame(directory: Path, ending: str, then: str) -> list[str]:
    """Rank 1 fails, and ``then`` is how rank 0 ends because of that: as the first to be noticed."""
    return script_of_first(
        directory,
        "import atexit, gradring, subprocess\n"
        "if rank == 0: note_first()\n"
        "else: atexit.register(until_first_was_collected)\n"
        "with gradring.init() as comm:\n"
        f"    if rank == 1: {ending}\n"
        "    try: comm.barrier()\n"
        f"    except gradring.errors.GradringError: {then}\n",
    )


@pytest.mark.parametrize(
    ("ending", "then", "code", "words"),
    [
        ("raise ValueError('no such layer')", "raise", 1, "[1] ValueError: no such layer"),
        ("sys.exit(7)", "raise", 7, "it printed nothing"),
        # Rank 0 names rank 1 all the same when it prints other words.
        ("sys.exit(7)", "sys.exit('it did not work')", 7, "it printed nothing"),
    ],
)
def test_a_rank_that_blames_another_failed_rank_did_not_fail_first(
    tmp_path: Path, ending: str, then: str, code: int, words: str
) -> None:
    program = script_of_blame(tmp_path, ending, then)
    done = gradring("run", "-np", 2, "--grace", 60, *program)
    assert done.returncode == code
    assert "gradring run: rank 0 has ended (exit code 1); 1 process still running" in done.stderr
    before, _, last = done.stderr.rpartition("gradring run: ")
    assert last.startswith("rank 1 on ") and f"failed first (exit code {code})" in last
    # Those that were shown last, because rank 0 printed its own before, are not repeated.
    assert words in (before if ABOVE in last else last)


def test_a_rank_that_the_launcher_ended_did_not_fail_first(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import gradring\n"
        "comm = gradring.init()\n"
        "if rank == 1:\n    comm.abort('stuck')\n"
        f"    {SLEEP}"
        "comm.barrier()\n",
    )
    done = gradring("run", "-np", 2, "--grace", 1, *program)
    assert done.returncode == 1
    last = done.stderr.rpartition("gradring run: ")[2]
    assert last.startswith("rank 0 on ") and "AbortedError" in last and "rank 1 on " in last


@pytest.mark.parametrize(
    ("lines", "blamed"),
    [
        (["gradring.errors.PeerLostError: rank 1 on a: has gone; restart the job"], 1),
        (
            [
                "tf.AbortedError: ",
                "gradring PeerLostError: sum 'w' (collective #2): rank 1 on a: x",
            ],
            1,
        ),
        (
            ["gradring.errors.AbortedError: rank 2 on a: raised w (collective #2): rank 0 on a: x"],
            2,
        ),
        (["gradring.errors.RendezvousError: nobody is there; rank 1 on a may have ended"], None),
        (["ValueError: rank 1 on a: bad"], None),
        (
            [
                "ValueError: bad",
                "During handling of the above exception, another exception occurred:",
                "Traceback (most recent call last):",
                "gradring.errors.AbortedError: rank 1 on a: stopped",
            ],
            None,
        ),
    ],
)
def test_a_rank_is_blamed_by_the_first_exception_of_a_traceback(
    lines: list[str], blamed: int | None
) -> None:
    words = ["Traceback (most recent call last):", *lines]
    found = blame_printed([line.encode() for line in words])
    assert (found and found.rank) == blamed


def test_what_a_rank_has_left_counts_more_than_what_it_printed(tmp_path: Path) -> None:
    left = tmp_path / "rank-0.json"
    printed = [
        b"Traceback (most recent call last):",
        b"gradring.errors.PeerLostError: rank 1 on a: has gone",
    ]
    assert blame_left(left, printed) == Blame(1, "PeerLostError")
    left.write_text('{"kind": "MismatchError", "rank": 3}')
    assert blame_left(left, printed) == Blame(3, "MismatchError")
    left.write_text('{"kind": "ConfigError", "rank": null}')
    assert blame_left(left, printed) is None
    for damaged in (
        "",
        "null",
        "[3]",
        "{}",
        '{"kind": 3, "rank": "3"}',
        '{"kind": "", "rank": -1}',
        "[" * 4000,
    ):
        left.write_text(damaged)
        assert blame_left(left, printed) == Blame(1, "PeerLostError")
    left.unlink()
    os.mkfifo(left)
    assert blame_left(left, printed) == Blame(1, "PeerLostError")


def test_a_program_that_a_rank_starts_does_not_speak_for_it(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "import gradring\n"
        "with gradring.Communicator(rank=0, world_size=1) as comm:\n"
        "    comm.abort('of no importance')\n"
        "    comm.barrier()\n"
    )
    then = f"sys.exit(subprocess.run([sys.executable, {str(other)!r}]).returncode)"
    program = script_of_blame(tmp_path, "sys.exit(7)", then)
    done = gradring("run", "-np", 2, "--grace", 60, *program)
    assert re.search(r"\[0\] .*AbortedError: .*rank 0 on \S+ .*of no importance", done.stderr)
    assert re.search(r"gradring run: rank 1 on \S+ failed first \(exit code 7\); ", done.stderr)


def test_a_failure_that_the_program_has_overcome_blames_no_rank(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import gradring\n"
        "try:\n"
        "    with gradring.init() as comm:\n"
        "        if rank == 1: comm.abort('try again')\n"
        "        comm.barrier()\n"
        "except gradring.errors.AbortedError: pass\n"
        "with gradring.init() as comm: comm.barrier()\n"
        "if rank == 0: raise ValueError('no such layer')\n",
    )
    done = gradring("run", "-np", 2, *program)
    assert re.search(r"rank 0 on \S+ failed first \(exit code 1\); its last words", done.stderr)


STOPPED = """
import gradring
comm = gradring.init()
comm.barrier()
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
"""
STILL_RUNS = """
if rank == 1: time.sleep(300)
with open(os.environ["GRADRING_FAILURE_FILE"], "w") as file:
    file.write('{"kind": "PeerLostError", "rank": 1}')
sys.exit("it did not work")
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(STOPPED, id="stopped", marks=pytest.mark.slow),
        pytest.param(STILL_RUNS, id="runs"),
    ],
)
def test_a_rank_that_has_not_ended_is_to_blame_though_another_one_failed_first(
    tmp_path: Path, text: str
) -> None:
    done = gradring("run", "-np", 2, "--grace", 1, *script(tmp_path, text))
    assert done.returncode == 1
    assert re.search(
        r"rank 0 on \S+ failed first \(exit code 1\), but rank 1 on \S+ is to blame "
        r"\(PeerLostError\), which still ran or was stopped; its last words",
        done.stderr,
    )


def test_uneven_steps_are_said_to_be_so_where_the_other_rank_ended_well(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import gradring, numpy as np\n"
        "with gradring.init() as comm:\n"
        "    for step in range(3 + rank): comm.all_reduce(np.ones(4), name='gradients')\n",
    )
    done = gradring("run", "-np", 2, *program)
    assert done.returncode == 1
    assert re.search(
        r"rank 1 on \S+ failed first \(exit code 1\), but rank 0 on \S+ is to blame "
        r"\(PeerLostError\), which had ended well; ",
        done.stderr,
    )
    assert re.search(
        r"\[1\] .*'gradients' float64\[4\] \(collective #4\): rank 0 on \S+: has closed.*"
        r"gradring\.tensorflow\.join\(batches\)\n",
        done.stderr,
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_last_words_that_were_shown_last_are_not_repeated(tmp_path: Path, ranks: int) -> None:
    """Those of several ranks may be the same, as where all miss a file."""
    program = script(tmp_path, "raise ValueError('no such layer')\n")
    done = gradring("run", "-np", ranks, "--grace", 60, *program)
    for rank in range(ranks):
        assert done.stderr.count(f"[{rank}] ValueError: no such layer\n") == 1
    assert re.fullmatch(
        r"gradring run: rank \d on \S+ failed first \(exit code 1\); its last words are above "
        r"\(--log-dir keeps all output\)",
        done.stderr.splitlines()[-1],
    )


def test_a_blame_is_of_the_system_where_the_last_traceback_says_so(tmp_path: Path) -> None:
    left = tmp_path / "rank-0.json"
    left.write_text('{"kind": "PeerLostError", "rank": 1}')
    head, text = (
        b"Traceback (most recent call last):",
        b"gradring.errors.PeerLostError: rank 1 on a",
    )
    broke = text + b": its control connection broke: Connection timed out (os error 110)"
    for printed, by_system in (
        ([head, broke], True),
        ([head, text + b": no sign of life"], False),
        ([head, broke, head, text + b": no sign of life"], False),
        ([b"(os error 110)"], False),
    ):
        assert blame_left(left, printed) == Blame(1, "PeerLostError", by_system)
    assert blame_printed([head, broke]) == Blame(1, "PeerLostError", by_system=True)


def test_what_tensorflow_says_when_it_starts_is_no_last_word() -> None:
    start_up = [
        b"2026-11-22 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations",
        b"To enable the following instructions: AVX2, in other operations, rebuild TensorFlow.",
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        b"E0000 00:00:1732270000.123456    1234 cuda_dnn.cc:8310] Unable to register cuDNN factory",
    ]
    assert last_words([*start_up, b"epoch 1"], []) == [b"epoch 1"]
    assert last_words(start_up, [b"step 7"]) == [b"step 7"]


@pytest.mark.parametrize(
    ("blamed", "first"),
    [
        ({2: None, 0: None}, 2),
        ({2: 0, 0: 1, 1: None}, 1),
        ({2: 1, 0: 1}, 2),
        ({1: 1, 0: 1}, 1),
        ({0: 1, 1: 1}, 1),
        ({1: 0, 0: 1}, 1),
        # The network of rank 2 was cut.
        ({2: 0, 0: 2, 1: 2}, 0),
        ({0: 2, 2: 1, 1: 2}, 0),
    ],
)
def test_the_first_cause_blames_no_other_failed_rank(
    blamed: dict[int, int | None], first: int
) -> None:
    assert first_cause(blamed) == first


@pytest.mark.parametrize(
    ("option", "target", "problem"),
    [
        ("--trace", "", "this is a directory; name a file in it"),
        ("--trace", ".", "this is a directory; name a file in it"),
        ("--trace", "file/x", "this file cannot be written (file: File exists); name"),
        ("--trace", "/proc/x", "this file cannot be written (/proc/x: No such file or directory)"),
        ("--log-dir", "file", "this is a file; name a directory"),
        ("--log-dir", "/proc/x", "this directory cannot be made (No such file or directory)"),
    ],
)
def test_targets_that_cannot_be_written_are_noticed_before_the_start(
    option: str, target: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = gradring("run", "-np", 1, option, target, "touch", "started")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gradring run: {option} {Path(target)}: {problem}")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("option", ["--trace", "--log-dir"])
def test_a_target_of_too_long_a_name_is_noticed_before_the_start(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = gradring("run", "-np", 1, option, "x" * 300, "touch", "started")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gradring run: {option}=")
    assert "its longest name 300" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_checking_the_target_of_a_timeline_leaves_no_empty_file(tmp_path: Path) -> None:
    trace = tmp_path / "new" / "timeline.json"
    done = succeeded("run", "-np", 1, "--trace", trace, "true")
    assert done.stderr == (
        f"gradring run: there is no timeline {trace}: no rank has left a part by close()\n"
    )
    assert list(trace.parent.iterdir()) == []


def test_a_damaged_part_of_a_timeline_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "timeline.json"
    part = part_of(trace, 0, group=1)
    part.parent.mkdir()
    part.write_text("{")
    assert merge(trace).startswith(f"there is no timeline {trace}: {part} cannot be read (")
