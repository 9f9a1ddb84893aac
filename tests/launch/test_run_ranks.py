"""``gradring.testing.run_ranks``: results, failures, timeouts, and no process left behind."""

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks_to_run as ranks
from launching import DEADLINE_S, pids_noted, wait_until_gone

from gradring.errors import PeerLostError
from gradring.testing import Outcome, RankFailure, RankTimeout, RemoteError, run_ranks
from gradring.testing.outcome import first_failure

HERE = Path(__file__).parent


def defined_in_this_test_file() -> str:
    return f"rank {ranks.my_rank()}"


def test_results_come_in_rank_order() -> None:
    results = run_ranks(ranks.place_and_arguments, 3, "a", 2)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({result[2] for result in results}) == 1
    assert results[0][3] == ("a", 2)


def test_functions_of_a_test_file_and_objects_are_carried() -> None:
    assert run_ranks(defined_in_this_test_file, 2) == ["rank 0", "rank 1"]
    assert run_ranks(ranks.moved, 2, ranks.Point(1, 2)) == [ranks.Point(1, 2), ranks.Point(2, 2)]


@pytest.mark.parametrize("name", ["my script.py", "my script", "my program/__main__.py"])
def test_a_script_can_run_its_own_functions(tmp_path: Path, name: str) -> None:
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import os\nfrom gradring.testing import run_ranks\n"
        "class Mine:\n    def __init__(self, rank): self.rank = rank\n"
        "def work(given): return type(given)(int(os.environ['GRADRING_RANK']))\n"
        "if __name__ == '__main__':\n"
        "    assert 'GRADRING_RANK' not in os.environ\n"
        "    results = run_ranks(work, 2, Mine(7))\n"
        "    print([isinstance(r, Mine) and r.rank for r in results])\n"
    )
    program = script.parent if script.name == "__main__.py" else script
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")


def test_a_lambda_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="not a function at the top level"):
        run_ranks(lambda: None, 2)


def test_each_rank_has_a_token_and_no_other_launchers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE", "SLURM_STEP_ID", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    first, second = run_ranks(ranks.environment, 2, env={"MY_SETTING": "on"})
    assert len(first["GRADRING_TOKEN"]) == 64 and first["MY_SETTING"] == "on"
    assert first["GRADRING_TOKEN"] == second["GRADRING_TOKEN"]
    assert not {"TF_CONFIG", "RANK", "WORLD_SIZE", "SLURM_STEP_ID", "PMI_RANK"} & set(first)


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(ranks.rank_1_raises, 3)
    failure = caught.value
    assert failure.rank == 1
    assert str(failure).startswith("rank 1 failed first\nrank 0: returned\nrank 1: KeyError: ")
    assert str(failure).count("in rank_1_raises") == 1 and "hello from rank 1" in str(failure)
    assert isinstance(failure.__cause__, KeyError)
    assert [outcome.value for outcome in failure.outcomes] == [0, None, 2]


def test_without_check_failures_are_values(tmp_path: Path) -> None:
    outcomes = run_ranks(
        ranks.rank_1_is_killed_and_the_others_blame_it, 3, str(tmp_path), check=False
    )
    assert [outcome.exit_code for outcome in outcomes] == [1, -signal.SIGKILL, 1]
    assert outcomes[1].exception is None and not outcomes[1].ok
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.exception, PeerLostError)
        assert (survivor.exception.rank, survivor.exception.elapsed_s) == (1, 0.5)


def test_the_rank_that_the_others_blame_is_the_one_that_failed_first(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(ranks.rank_1_is_killed_and_the_others_blame_it, 3, str(tmp_path))
    assert caught.value.rank == 1
    assert "rank 1: killed by SIGKILL" in str(caught.value)


def test_ranks_that_only_blame_each_other_are_judged_by_time() -> None:
    failed = [Outcome(rank, None, PeerLostError("gone", rank=1 - rank), 1, "") for rank in range(2)]
    culprit = first_failure(failed, [2.0, 1.0])
    assert culprit is not None and culprit.rank == 1


def test_what_cannot_be_pickled_arrives_as_text() -> None:
    outcomes = run_ranks(ranks.rank_1_raises_what_cannot_be_pickled, 2, check=False)
    assert isinstance(outcomes[1].exception, RemoteError)
    assert "Unpicklable: 3 and 4" in str(outcomes[1].exception)
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(ranks.rank_1_returns_what_cannot_be_pickled, 2)


@pytest.mark.parametrize("leave", [ranks.rank_1_leaves, ranks.rank_1_calls_exit])
def test_a_rank_that_leaves_early_has_failed(leave: Callable[[int], int]) -> None:
    outcomes = run_ranks(leave, 2, 5, check=False)
    assert [outcome.exit_code for outcome in outcomes] == [0, 5]
    assert [outcome.ok for outcome in outcomes] == [True, False]


def test_a_rank_that_leaves_quietly_has_failed_too() -> None:
    with pytest.raises(RankFailure, match="before its function returned"):
        run_ranks(ranks.rank_1_leaves, 2, 0)


def test_a_timeout_names_the_ranks_shows_where_they_were_and_kills_them(tmp_path: Path) -> None:
    with pytest.raises(RankTimeout) as caught:
        run_ranks(ranks.rank_0_sleeps_with_a_child, 2, str(tmp_path), timeout=10, check=False)
    wait_until_gone(pids_noted(tmp_path, 1))
    failure = caught.value
    assert failure.ranks == [0] and isinstance(failure, TimeoutError)
    assert "rank 0 of 2 had not finished after 10 s" in str(failure)
    assert "in rank_0_sleeps_with_a_child" in failure.outcomes[0].output
    assert failure.outcomes[1].ok
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)


def test_a_timeout_shows_where_each_rank_was() -> None:
    outcomes = [Outcome(rank, None, None, -9, f"it is here, {rank}") for rank in range(3)]
    message = str(RankTimeout([0, 2], outcomes, 5.0))
    assert "it is here, 0" in message and "it is here, 2" in message
    assert "it is here, 1" not in message


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_ranks_end_with_the_process_that_called(tmp_path: Path, signum: int) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import ranks_to_run as r\n"
        f"from gradring.testing import run_ranks\n"
        f"run_ranks(r.all_sleep_with_a_child, 2, {str(tmp_path)!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as caller:
        pids = pids_noted(tmp_path, 2)
        caller.send_signal(signum)
        caller.wait(DEADLINE_S)
    wait_until_gone(pids)


@pytest.mark.parametrize(("world_size", "timeout"), [(0, 1.0), (1, 0.0)])
def test_impossible_arguments_are_refused(world_size: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        run_ranks(ranks.environment, world_size, timeout=timeout)
