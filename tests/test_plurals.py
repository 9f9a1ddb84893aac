"""Sentences tell one thing from several."""

import pytest

from gradring.config.words import counted, listed, ranks


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (counted(0, "rank"), "0 ranks"),
        (counted(1, "rank"), "1 rank"),
        (counted(2, "process"), "2 processes"),
        (counted(1, "process"), "1 process"),
        (listed(["a"]), "a"),
        (listed("abc"), "a, b and c"),
        (ranks([7]), "rank 7"),
        (ranks({2, 0}), "ranks 0 and 2"),
        (ranks([3, 1, 2]), "ranks 1, 2 and 3"),
    ],
)
def test_words_agree_with_numbers(said: str, words: str) -> None:
    assert said == words
