"""What must be true of the demo's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradring.tools.demo.results import Results

REQUIRED_ACCURACY = 0.97
#: Bound between a weight of the workers and of the single process; rounding alone stays below.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Check:
    """One requirement, and a sentence that says how it went."""

    passed: bool
    sentence: str


def checks(results: Results) -> list[Check]:
    """All requirements, in the order in which they are shown."""
    return [_identical(results), _accurate(results), _equal_to_single(results)]


def exit_code(checked: Sequence[Check]) -> int:
    """0 if everything is as it must be, else 1."""
    return 0 if all(check.passed for check in checked) else 1


def _identical(results: Results) -> Check:
    hashes = [rank.weights_hash for rank in results.gradring]
    if len(set(hashes)) == 1:
        return Check(True, f"Both ranks hold bit-identical weights (SHA-256 {hashes[0]}...).")
    listed = ", ".join(f"rank {i} {text}..." for i, text in enumerate(hashes))
    return Check(False, f"The ranks hold different weights: SHA-256 {listed}.")


def _accurate(results: Results) -> Check:
    reached = results.gradring[0].accuracies[-1]
    single = results.single.accuracies[-1]
    return Check(
        reached >= REQUIRED_ACCURACY,
        f"The test accuracy is {reached:.3f}; it must be at least {REQUIRED_ACCURACY}, and the "
        f"single process reached {single:.3f}.",
    )


def _equal_to_single(results: Results) -> Check:
    difference = results.largest_difference
    return Check(
        difference <= LARGEST_DIFFERENCE,
        f"After all {results.gradring[0].steps} steps no weight differs by more than "
        f"{difference:.1e} from the single process on the combined batches; "
        f"{LARGEST_DIFFERENCE:.0e} is allowed.",
    )
