"""Tests of Keras that pass in one process and not on ranks, each with the reason."""

from __future__ import annotations

import re

#: By pattern of the test's identifier: the fewest ranks at which it fails, and why.
LEFT: dict[str, tuple[int, str]] = {
    r"test_save_model_exception_raised": (
        1,
        "a save that fails leaves no file, since gradring writes whole files or none",
    ),
    r"BackupAndRestoreCallbackTest::test_(backup_corrupted|best_case_(epoch|step))$": (
        2,
        "each rank looks for the backup in a directory of its own, and rank 0 writes it",
    ),
    r"test_model_checkpoint_(loading|options)$|swap_ema_weights_on_epoch$": (
        2,
        "each rank looks for the file of `ModelCheckpoint` in a directory of its own, and rank 0 "
        "writes it",
    ),
}


def why(test: str, ranks: int) -> str | None:
    """The reason why a test cannot pass on so many ranks, or None."""
    found = (
        reason
        for pattern, (fewest, reason) in LEFT.items()
        if fewest <= ranks and re.search(pattern, test)
    )
    return next(found, None)
