"""Lines of many ranks: whole, prefixed, complete."""

import fcntl
import os
import pty
import re
import socket
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
from launching import DEADLINE_S, IN_A_GROUP, gradring, script, started

from gradring.launch.output import (
    MAX_LINE_BYTES,
    PROGRESS_S,
    LineBuffer,
    Logs,
    RankOutput,
    Tracebacks,
)
from gradring.launch.processes import describe_exit
from gradring.launch.report import MAX_LINES, last_words
from support.commands import command_line
from support.waiting import wait_until


def test_lines_of_concurrent_writers_stay_whole(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        IN_A_GROUP + "for line in range(200):\n"
        "    stream = (sys.stdout, sys.stderr)[line % 2]\n"
        "    for piece in (f'<{rank} ', 'x' * (line * 37 % 5000), f' {line}>\\n'):\n"
        "        stream.write(piece)\n"
        "        stream.flush()\n",
    )
    both = tmp_path / "both"
    with open(both, "wb") as target:
        subprocess.run(
            command_line("run", "-np", 4, *program),
            stdout=target,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=True,
        )
    lines = both.read_text().splitlines()
    assert len(lines) == 800
    pattern = re.compile(r"\[(\d)\] <\1 x* (\d+)>")
    matches = [pattern.fullmatch(line) for line in lines]
    assert Counter(match[1] for match in matches if match) == dict.fromkeys("0123", 200)


def test_a_last_line_without_an_end_is_printed(tmp_path: Path) -> None:
    done = gradring(
        "run", "-np", 2, *script(tmp_path, "sys.stdout.write('half'); sys.stderr.write('more')")
    )
    assert sorted(done.stdout.splitlines()) == ["[0] half", "[1] half"]
    assert sorted(done.stderr.splitlines()[:2]) == ["[0] more", "[1] more"]


@pytest.mark.parametrize(("no_colour", "first"), [("", b"\x1b[36m[0]\x1b[0m x"), ("1", b"[0] x")])
def test_prefixes_have_colours_on_a_terminal(no_colour: str, first: bytes) -> None:
    controller, terminal = pty.openpty()
    command = command_line("run", "-np", 1, "echo", "x")
    environ = {**os.environ, "NO_COLOR": no_colour}
    subprocess.run(command, stdout=terminal, env=environ, timeout=DEADLINE_S, check=True)
    os.close(terminal)
    assert os.read(controller, 100).rstrip() == first
    os.close(controller)


def test_output_that_is_not_text_is_passed_on(tmp_path: Path) -> None:
    program = script(tmp_path, "sys.stdout.buffer.write(b'\\xff\\x00\\n')")
    command = command_line("run", "-np", 1, *program)
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == b"[0] \xff\x00\n"


def test_logs_hold_each_ranks_lines_without_prefix(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    program = script(
        tmp_path, "print('out', rank); print('err', rank, file=sys.stderr); sys.exit(rank)"
    )
    done = gradring("run", "-np", 2, "--log-dir", logs, *program)
    for rank in range(2):
        lines = (logs / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]
    assert str(logs / "rank-1.log") in done.stderr


# PYTHONUNBUFFERED is that of the launcher; the ranks have one of their own.
@pytest.mark.parametrize(
    ("full", "unbuffered"),
    [("log", ""), ("output", ""), ("output", "1"), ("errors", ""), ("errors", "1")],
)
def test_a_full_disk_ends_no_rank(full: str, unbuffered: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    if full == "log":
        (logs / "rank-0.log").symlink_to("/dev/full")
    program = script(
        tmp_path,
        "for line in range(5):\n"
        "    print(line, flush=True)\n"
        "    print(line, file=sys.stderr)\n"
        "    time.sleep(0.05)\n"
        "open(f'{rank}.end', 'w')\n",
    )
    with open("/dev/full", "wb") as disk:
        done = subprocess.run(
            command_line("run", "-np", 2, "--log-dir", logs, *program),
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=disk if full == "output" else subprocess.PIPE,
            stderr=disk if full == "errors" else subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
        )
    assert all((tmp_path / f"{rank}.end").exists() for rank in range(2)), done
    assert sorted((logs / "rank-1.log").read_text().split()) == sorted("01234" * 2)
    assert done.returncode == 0
    if full == "log":
        said = f"rank-0.log on {socket.gethostname()} cannot be written any more (No space left"
        assert done.stderr.count(said) == 1


def test_a_reader_that_goes_away_ends_the_ranks(tmp_path: Path) -> None:
    run = ("run", "-np", 2, "--grace", 5, *script(tmp_path, "while True: print('again')"))
    with started(*run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(DEADLINE_S) == 128 + 13
        assert b"Exception" not in launcher.stderr.read()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_slow_reader_gets_all_though_the_stream_does_not_block(
    unbuffered: str, tmp_path: Path
) -> None:
    # A rank at the same terminal may have made it so; PYTHONUNBUFFERED is that of the launcher.
    run = ("run", "-np", 1, *script(tmp_path, "print('word\\n' * 50_000)"))
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    full, target = os.pipe()
    os.set_blocking(target, False)
    with open(full, "rb") as reader, started(*run, stdout=target, env=environ) as launcher:
        os.close(target)
        wait_until(lambda: _unread(full) > 40_000, "the pipe is full")
        assert reader.read().count(b"word") == 50_000
        assert launcher.wait(DEADLINE_S) == 0


def _unread(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_progress_bar_shows_its_newest_state_now_and_then() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"10%\r20%\r30%", 0.0) == [b"30%"]
    assert buffer.feed(b"\r40%", PROGRESS_S / 2) == []
    assert buffer.feed(b"\r50%\r", PROGRESS_S) == [b"50%"]
    assert buffer.feed(b"50%\r", PROGRESS_S * 2) == []
    assert buffer.feed(b"\r100%\r\n", PROGRESS_S * 2.5) == [b"100%"]
    assert buffer.feed(b"done\r", PROGRESS_S * 4) == [b"done"]
    assert buffer.feed(b"\nnext\n", PROGRESS_S * 4) == [b"next"]
    assert buffer.flush() == []


def test_a_progress_bar_between_two_ranks_breaks_no_line(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        IN_A_GROUP
        + "for step in range(100): sys.stderr.write(f'\\rstep {step}')\nprint(file=sys.stderr)\n",
    )
    done = gradring("run", "-np", 2, *program)
    lines = done.stderr.split("\n")[:-1]
    assert all(re.fullmatch(r"\[[01]\] step \d+", line) for line in lines)
    assert {"[0] step 99", "[1] step 99"} <= set(lines)


@pytest.mark.parametrize(
    "printed",
    [
        b"10%\r20%\n",
        b"10%\r20%\r\n",
        b"\r10%\r20%",
        b"a\r\nb\r\n",
        b"\r\r\n",
        b"x" * (MAX_LINE_BYTES + 5) + b"\r100%\nnext\n",
        b"".join(b"\rstep %d" % step for step in range(20_000)) + b"\n",
    ],
)
def test_a_log_has_every_state_of_a_line_that_is_redrawn(printed: bytes, tmp_path: Path) -> None:
    (tmp_path / "printed").write_bytes(printed)
    gradring("run", "-np", 1, "--log-dir", tmp_path, "--", "cat", tmp_path / "printed")
    log = (tmp_path / "rank-0.log").read_bytes()
    assert log == printed + b"\n" * (not printed.endswith(b"\n"))


def test_a_line_of_one_stream_begins_anew_in_a_log_though_the_others_is_being_redrawn(
    tmp_path: Path,
) -> None:
    with Logs(tmp_path, replace=True) as logs:
        log = logs.open("rank 0")
        assert log is not None
        for stream, data in [(1, b"10%\r"), (1, b"20%\r"), (2, b"why\n"), (1, b"30%\n"), (1, b"")]:
            log.write(data, stream)
    assert (tmp_path / "rank-0.log").read_bytes() == b"10%\r20%\r\nwhy\n30%\n"


def test_lines_cut_anywhere_are_put_together() -> None:
    text = b"one\ntwo\r\n\nthree \xc3\xa9\nfour"
    for cut in range(len(text)):
        buffer, lines, passed = LineBuffer(), [], b""
        # Progress lines are timed; at one instant an unfinished "two\r" may be shown once.
        for part in (text[:cut], text[cut:], None):
            lines += buffer.flush() if part is None else buffer.feed(part, 0.0)
            passed += b"".join(buffer.passed)
        assert lines == [b"one", b"two", b"", b"three \xc3\xa9", b"four"]
        assert passed == text + b"\n"


def test_an_endless_line_is_passed_on_in_pieces() -> None:
    buffer = LineBuffer()
    lines = [line for _ in range(10) for line in buffer.feed(b"x" * MAX_LINE_BYTES, 0.0)]
    assert sum(map(len, lines)) + len(buffer.flush()[0]) == 10 * MAX_LINE_BYTES
    assert max(map(len, lines)) == MAX_LINE_BYTES


def test_last_words_without_a_traceback_are_the_last_lines() -> None:
    lines = [b"line %d" % number for number in range(50)]
    assert last_words(lines, [b"out"]) == lines[-20:]
    assert last_words([], [b"out"]) == [b"out"]


def test_an_older_traceback_is_not_repeated() -> None:
    begin = b"Traceback (most recent call last):"
    lines = [begin, b"OldError", b"fine again", begin, b"NewError"]
    assert last_words(lines, []) == [begin, b"NewError"]


def test_of_a_long_traceback_the_middle_is_left_out() -> None:
    begin = b"Traceback (most recent call last):"
    calls = [b"  call %d" % number for number in range(2 * MAX_LINES)]
    found = last_words([begin, *calls, b"RecursionError"], [])
    half = MAX_LINES // 2
    left_out = b"... %d lines left out ..." % (2 * MAX_LINES + 2 - 2 * half)
    assert found == [begin, *calls[: half - 1], left_out, *calls[1 - half :], b"RecursionError"]


def test_of_ranks_that_are_all_interrupted_one_traceback_is_shown() -> None:
    first, second, quiet = (cast(RankOutput, object()) for _ in range(3))
    tracebacks = Tracebacks()
    begin = b"Traceback (most recent call last):"
    assert tracebacks.shown(second, [begin, b"of before"]) == [begin, b"of before"]
    tracebacks.one = True
    assert tracebacks.shown(first, [b"step 3", begin]) == [b"step 3", begin]
    assert tracebacks.shown(first, [b"KeyboardInterrupt"]) == [b"KeyboardInterrupt"]
    assert tracebacks.shown(quiet, [b"saved"]) == [b"saved"]
    assert tracebacks.shown(second, [b"step 3", begin]) == [b"step 3"]
    assert tracebacks.shown(second, [b"  in fit", b"KeyboardInterrupt"]) == []
    assert tracebacks.hidden == {second: 3}


def test_the_first_log_that_cannot_be_written_ends_the_job_and_a_later_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-1.log").mkdir()
    with Logs(tmp_path, replace=True) as logs:
        with pytest.raises(IsADirectoryError):
            logs.open("rank 1")
        assert logs.open("rank 0") is not None
        assert logs.open("rank 1") is None
        assert logs.open("rank 1") is None
    said = f"gradring run: rank 1 has no log: {tmp_path / 'rank-1.log'}: Is a directory\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")]
)
def test_an_end_by_a_signal_without_a_name_has_words_too(code: int, words: str) -> None:
    assert describe_exit(code) == words
