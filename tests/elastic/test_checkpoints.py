"""Commits on disk: written whole, passed over when they are not, and what a job resumes from."""

import contextlib
import logging
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring.elastic
from gradring.elastic import State
from gradring.elastic.checkpoints import Checkpoints
from gradring.elastic.commit import Commit
from gradring.errors import ConfigError, MismatchError, RestoreError, SaveError
from gradring.testing import run_ranks

STEPS = 30
EVERY = 4


def commit(number: int) -> Commit:
    return Commit.of(number, {"weights": np.full(1000, float(number)), "step": number})


def written(directory: Path, *numbers: int, keep: int = 100) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep)
    for number in numbers:
        checkpoints.write(commit(number))
        checkpoints.flush()
    return checkpoints


def test_the_newest_files_are_kept_and_nothing_else_stays(tmp_path: Path) -> None:
    (tmp_path / "0.unfinished").write_bytes(b"of a process that was killed")
    checkpoints = written(tmp_path, *range(1, 8), keep=3)
    assert sorted(os.listdir(tmp_path)) == [f"commit-{n:012d}.gradring" for n in (5, 6, 7)]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.number == newest.values()["step"] == 7
    assert newest.values()["weights"].tolist() == [7.0] * 1000


@pytest.mark.parametrize("harm", ["torn", "one bit", "empty", "other file", "unreadable"])
def test_a_file_that_is_not_whole_is_named_and_passed_over(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, 1, 2)
    (tmp_path / "0.unfinished").write_bytes(b"half of it")
    path = tmp_path / "commit-000000000002.gradring"
    contents = bytearray(path.read_bytes())
    if harm == "torn":
        path.write_bytes(contents[:-1])
    elif harm == "one bit":
        contents[-1] ^= 1
        path.write_bytes(contents)
    elif harm == "unreadable":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(b"" if harm == "empty" else b"something else entirely")
    with caplog.at_level(logging.WARNING):
        newest = checkpoints.newest()
    assert newest is not None
    assert newest.number == 1
    assert str(path) in caplog.text


def _deep() -> bytes:
    return b'{"step": {"value": ' + 100_000 * b"[" + 100_000 * b"]" + b"}}"


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"\xff",
        _deep(),
        b'{"step": {"dtype": "<f8", "shape": null}}',
        b'{"step": {"dtype": "<f8", "shape": [3, -1]}}',
        b'{"step": {"dtype": "<f8", "shape": ["a"]}}',
        b'{"step": {"dtype": "O", "shape": [1]}}',
        b'{"step": {"dtype": "no dtype", "shape": [1]}}',
        b'{"step": {"dtype": "<f8", "shape": [9]}}',
        b'{"step": {}}',
        b'{"step": 1}',
        b"[1]",
        b"{}" + bytes(8),
        None,
    ],
    ids=lambda text: str(text)[:40],
)
def test_nonsense_with_the_right_hash_is_passed_over(
    tmp_path: Path, text: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, 1)
    length = np.array([-1 if text is None else len(text.rstrip(b"\0"))], "<i8").tobytes()
    payload = np.frombuffer(length + (text or b"{}"), np.uint8)
    checkpoints.write(Commit(2, payload))
    checkpoints.flush()
    with caplog.at_level(logging.WARNING):
        newest = checkpoints.newest()
    assert newest is not None and newest.number == 1
    assert "commit-000000000002.gradring is passed over: " in caplog.text


@pytest.mark.parametrize("made", [np.zeros((1, 4), np.float32), np.zeros((1, 3))], ids=str)
def test_a_checkpoint_with_arrays_of_another_kind_is_of_another_program(
    tmp_path: Path, made: Any
) -> None:
    for weights, mistaken in ((np.ones((2, 4)), False), (made, True)):
        with gradring.init(rank=0, world_size=1) as comm:
            state = State(weights=weights)
            state.checkpoint_to(tmp_path)
            if mistaken:
                with pytest.raises(MismatchError, match=r"has 'weights' as float64 \(2, 4\), and"):
                    state.sync(comm)
                assert state.weights is made
            else:
                state.sync(comm)
                state.commit()
                state.flush()


def test_what_cannot_be_written_stays_in_memory_and_the_next_commit_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "gone"
    with gradring.init(rank=0, world_size=1) as comm:
        state = State(step=0)
        state.checkpoint_to(directory, max_failures=2)
        state.sync(comm)
        shutil.rmtree(directory)
        state.commit()
        with pytest.raises(SaveError, match=r"gone: .*No such file.* \(1 in a row\); make room"):
            state.flush()
        state.commit()
        with pytest.raises(SaveError, match="2 in a row"):
            state.flush()
        with pytest.raises(SaveError, match=r"on \S+ could not write its checkpoints: .*in a row"):
            state.commit()
        with pytest.raises(SaveError, match="3 in a row"):
            state.flush()
        directory.mkdir()
        # What is said again and again ends with the first attempt that succeeds.
        with contextlib.suppress(SaveError):
            state.commit()
        state.flush()
        state.commit()
        state.flush()
    assert "commit 1 could not be written to" in caplog.text
    assert "again, after 3 that could not be written" in caplog.text
    assert len(os.listdir(directory)) == 2


def lose_the_disk(directories: list[str]) -> tuple[int, str, str]:
    """Trains on, and says what ends it when that is too much, and when it asks."""
    with gradring.init() as comm:
        directory = Path(directories[comm.rank])
        state = State(step=0)
        state.checkpoint_to(directory)
        said: list[str] = []

        @gradring.elastic.run(comm)
        def train(state: State) -> None:
            while state.step < STEPS:
                if state.step == 1:
                    state.flush()  # nothing is written meanwhile
                    shutil.rmtree(directory)
                if state.step == STEPS - 1:
                    with pytest.raises(SaveError) as asked:
                        state.flush()
                    said.append(str(asked.value))
                    directory.mkdir()
                comm.all_reduce(1)
                state.step += 1
                state.commit()
            state.flush()

        train(state)
        files = len(os.listdir(directory))
        state.checkpoint_to(directory / "more", max_failures=2)
        shutil.rmtree(directory)

        @gradring.elastic.run(comm)
        def train_for_ever(state: State) -> None:
            while True:
                comm.all_reduce(1)
                state.commit()

        with pytest.raises(SaveError) as raised:
            train_for_ever(state)
        return files, said[0], str(raised.value)


def test_a_disk_that_is_gone_ends_no_elastic_job_before_all_ranks_are_told(tmp_path: Path) -> None:
    directories = [str(tmp_path / "a"), str(tmp_path / "b")]
    found = run_ranks(lose_the_disk, 2, directories)
    assert [files for files, *_ in found] == [1, 0]
    for _, asked, raised in found:
        assert re.match(r"rank 0 on \S+ could not write its checkpoints: OSError: \S+/a: ", asked)
        assert re.match(r"rank 0 on \S+ could not write its checkpoints: .*a/more: ", raised)
        # More may have failed beside the ranks before they agree to give up.
        (failures,) = re.findall(r"\((\d+) in a row\)", raised)
        assert int(failures) >= 2


def read_what_is_gone(directories: list[str]) -> str:
    with gradring.init() as comm:
        state = State(step=0)
        state.checkpoint_to(directories[comm.rank])
        if comm.rank == 1:
            shutil.rmtree(directories[comm.rank])
        with pytest.raises(RestoreError) as raised:
            state.sync(comm)
        return str(raised.value)


def test_a_directory_that_cannot_be_read_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    for text in run_ranks(read_what_is_gone, 2, [str(tmp_path / "a"), str(tmp_path / "b")]):
        assert re.match(r"rank 1 on \S+ could not read its checkpoints: FileNotFoundError", text)


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"file/here cannot be made on \S+: .*; give one that"):
        State(step=0).checkpoint_to(tmp_path / "file" / "here")


def test_what_has_just_been_written_outlives_newer_files_that_are_not_whole(tmp_path: Path) -> None:
    (tmp_path / "commit-000000000100.gradring").write_bytes(b"torn")
    newest = written(tmp_path, 97, 98, keep=1).newest()
    assert newest is not None
    assert newest.number == 98


def test_an_error_of_any_kind_while_writing_is_told_and_ends_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_write", lambda *_: np.empty(1 << 62))
        checkpoints.write(commit(1))
        with pytest.raises(OSError, match=r"Error: .*allocate|too large|too big"):
            checkpoints.flush()
    checkpoints.write(commit(2))
    checkpoints.flush()
    assert os.listdir(tmp_path) == ["commit-000000000002.gradring"]


def test_a_system_without_room_for_a_thread_keeps_the_commit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        checkpoints.write(commit(1))
        with pytest.raises(OSError, match=r"can't start new thread \(1 in a row\); make room"):
            checkpoints.flush()
    assert f"commit 1 could not be written to {tmp_path} (RuntimeError: can't" in caplog.text
    checkpoints.write(commit(2))
    checkpoints.flush()
    assert os.listdir(tmp_path) == ["commit-000000000002.gradring"]


def test_a_commit_for_which_there_is_no_memory_is_not_passed_over_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = written(tmp_path, 1, 2)

    def values(self: Commit) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(Commit, "values", values)
    with pytest.raises(MemoryError):
        checkpoints.newest()


def test_however_many_commits_fail_none_ends_a_program_that_has_said_so(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    state = State(step=0)
    # Without a directory there is nothing to wait for.
    state.flush()
    state.checkpoint_to(directory, max_failures=None)
    with gradring.init(rank=0, world_size=1) as comm:
        state.sync(comm)
        shutil.rmtree(directory)
        for number in range(1, 4):
            state.commit()
            with pytest.raises(SaveError, match=rf"\({number} in a row\)"):
                state.flush()


def test_settings_that_keep_nothing_are_refused(tmp_path: Path) -> None:
    state = State(step=0)
    for wrong in (0, 1.5, float("nan"), "2", True):
        for name in ("keep", "every_commits", "max_failures"):
            given: dict[str, Any] = {name: wrong}
            with pytest.raises(
                ConfigError, match=rf"{name}=.* is not a whole number of at least 1"
            ):
                state.checkpoint_to(tmp_path, **given)
    with pytest.raises(ConfigError, match="'sync'"):
        State(sync=1)


def trained(directories: list[str], killed_at: int | None) -> Any:
    """A training whose every step depends on all before, killed in the middle of a step."""
    with gradring.init() as comm:
        state = State(weights=np.random.default_rng(comm.rank).normal(size=100), step=0, seen=[])
        state.checkpoint_to(directories[comm.rank], every_commits=EVERY, keep=2)
        state.sync(comm)
        begun_at = state.step
        while state.step < STEPS:
            data = np.random.default_rng([state.step, comm.rank]).normal(size=100)
            gradient = comm.all_reduce(np.sin(state.weights * data) + state.weights, op="mean")
            if state.step == killed_at:
                state.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            state.weights -= 0.1 * gradient
            state.seen.append(state.step)
            state.step += 1
            state.commit()
        return begun_at, state.seen, state.weights.tobytes()


def test_a_job_that_was_killed_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = run_ranks(trained, 2, [str(tmp_path / f"whole-{rank}") for rank in (0, 1)], None)
    assert whole[0][2] == whole[1][2]
    # The file is where rank 0 wrote it; after the restart, rank 1 is the one on that host.
    broken = [str(tmp_path / "host-a"), str(tmp_path / "host-b")]
    for outcome in run_ranks(trained, 2, broken, 13, check=False):
        assert outcome.exit_code == -signal.SIGKILL
    resumed = run_ranks(trained, 2, broken[::-1], None)
    for (begun_at, seen, weights), (_, _, expected) in zip(resumed, whole, strict=True):
        assert begun_at == 12
        assert seen == list(range(STEPS))
        assert weights == expected


def of_another_program(directory: str) -> Any:
    with gradring.init() as comm:
        state = State(weights=np.zeros(3), epoch=0)
        state.checkpoint_to(directory if comm.rank == 1 else directory + "-empty")
        with pytest.raises(ConfigError) as raised:
            state.sync(comm)
        return str(raised.value)


def test_checkpoints_of_another_program_are_refused_by_every_rank(tmp_path: Path) -> None:
    written(tmp_path / "old", 5)
    for text in run_ranks(of_another_program, 2, str(tmp_path / "old")):
        assert "number 5 of rank 1 on" in text
        assert "has step that this State does not have, and lacks epoch. Another program" in text
