"""The verdict of the demo: what must be true of its results, and what it says when it is not."""

import numpy as np
from made_up import rank_result, results

from gradring.tools.demo.report import Results, checks

FAR_AWAY = (np.full((2, 3), 1.0001, np.float32), np.zeros(4, np.float32))
NOT_A_NUMBER = (np.full((2, 3), 1.0, np.float32), np.array([0, np.nan, 0, 0], np.float32))


def failures(of: Results) -> list[str]:
    """The sentences of the checks that fail."""
    return [sentence for passed, sentence in checks(of) if not passed]


def test_good_results_pass() -> None:
    assert failures(results()) == []


def test_different_hashes_fail_and_are_both_named() -> None:
    ranks = (rank_result(0), rank_result(1, weights_hash="6f" * 8))
    (sentence,) = failures(results(gradring=ranks))
    for rank in ranks:
        assert f"rank {rank.rank} {rank.weights_hash}" in sentence


def test_a_low_accuracy_fails() -> None:
    ranks = (rank_result(0, accuracy=0.969), rank_result(1))
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
