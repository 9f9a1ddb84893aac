"""The verdict of the demo: what must be true of its results, and what it says when it is not."""

import numpy as np
from made_up import rank_result, results

from gradring.observe.step_report import Totals
from gradring.tools.demo.results import Results, checks, exit_code, percentiles_ms

ALTERED = (np.full((2, 3), 1.0 + 2.0**-20, np.float32), np.zeros(4, np.float32))
FAR_AWAY = (np.full((2, 3), 1.0001, np.float32), np.zeros(4, np.float32))
NOT_A_NUMBER = (np.full((2, 3), 1.0, np.float32), np.array([0, np.nan, 0, 0], np.float32))


def failures(of: Results) -> list[str]:
    """The sentences of the checks that fail; they decide the exit code."""
    checked = checks(of)
    failed = [check.sentence for check in checked if not check.passed]
    assert exit_code(checked) == (1 if failed else 0)
    return failed


def test_good_results_pass() -> None:
    assert failures(results()) == []


def test_different_hashes_fail_and_are_both_named() -> None:
    ranks = (rank_result(0), rank_result(1, weights=ALTERED))
    (sentence,) = failures(results(gradring=ranks))
    for rank in ranks:
        assert f"rank {rank.rank} {rank.weights_hash}" in sentence


def test_a_low_accuracy_fails() -> None:
    ranks = (rank_result(0, accuracies=(0.5, 0.969)), rank_result(1))
    (sentence,) = failures(results(gradring=ranks))
    assert "0.969" in sentence


def test_weights_far_from_the_single_process_fail() -> None:
    ranks = (rank_result(0, weights=FAR_AWAY), rank_result(1, weights=FAR_AWAY))
    (sentence,) = failures(results(gradring=ranks))
    assert "1.0e-04" in sentence


def test_weights_that_are_not_numbers_fail() -> None:
    ranks = (rank_result(0, weights=NOT_A_NUMBER), rank_result(1, weights=NOT_A_NUMBER))
    assert len(failures(results(gradring=ranks))) == 1


def test_a_missing_comparison_is_no_failure() -> None:
    assert failures(results(mirrored=())) == []


def test_the_parts_of_a_step_add_up_and_input_belongs_to_computing() -> None:
    rank = rank_result(
        totals=Totals(steps=10, elapsed_s=0.1, comm_s=0.01, wait_s=0.03, input_s=0.02)
    )
    np.testing.assert_allclose(rank.parts_ms, (6.0, 1.0, 3.0))
    np.testing.assert_allclose(rank.step_ms, 10.0)


def test_a_step_without_collectives_is_all_compute() -> None:
    rank = rank_result(totals=Totals(steps=4, elapsed_s=0.04))
    np.testing.assert_allclose(rank.parts_ms, (10.0, 0.0, 0.0))


def test_percentiles_are_of_all_steps_also_of_the_disturbed_ones() -> None:
    steps_s = [milliseconds / 1000 for milliseconds in range(101)]
    np.testing.assert_allclose(percentiles_ms(steps_s), (50.0, 90.0, 99.0))
