"""Names of Keras on which gradring relies: a Keras without one trains right, or is refused by name.

Each is taken away, or gets other parameters, as a later release may have it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from gradring.testing import run_ranks
from support.log_lines import kept_lines
from support.tf_worker import join


def _owners(owner: Any, name: str) -> list[Any]:
    """The module, or the classes among a class and its bases, that define a name."""
    kinds = [each for each in getattr(owner, "__mro__", [owner]) if each is not object]
    return [each for each in kinds if name in vars(each)]


@contextlib.contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """Inside, no class in the line has this name."""
    kept = [(each, vars(each)[name]) for each in _owners(owner, name)]
    for each, _ in kept:
        delattr(each, name)
    try:
        yield
    finally:
        for each, value in kept:
            setattr(each, name, value)


def not_named(name: str) -> Any:
    """Inside, no code names this attribute."""
    from gradring.tensorflow.seams import table as seams

    plain = seams._names
    return mock.patch.object(seams, "_names", lambda it, each: each != name and plain(it, each))


def futures() -> Any:
    """What becomes of `repair` where each name in turn is gone, or takes other parameters."""
    import keras

    from gradring.errors import ConfigError
    from gradring.tensorflow.keras import compat_keras
    from gradring.tensorflow.seams import keras_names

    whole = compat_keras.look()
    rows = list(whole.owners.items())

    def state() -> list[Any]:
        found = (
            [vars(each).get(seam.name) for each in getattr(owner, "__mro__", [owner])]
            for seam, owner in rows
        )
        return [value for values in found for value in values]

    def tried() -> str:
        before = state()
        try:
            compat_keras.repair()
        except ConfigError as error:
            after = state()
            assert all(one is other for one, other in zip(before, after, strict=True))
            return str(error)
        raise AssertionError("it was not refused")

    said: dict[str, list[str]] = {}
    for seam, owner in rows:
        said[str(seam)] = []
        if seam.is_attribute:
            with not_named(seam.name):
                said[str(seam)].append(tried())
            continue
        with without(owner, seam.name):
            said[str(seam)].append(tried())
        if seam.takes:

            def other(self: Any, something: Any = None, *args: Any) -> None:
                """What a later release may have."""

            with mock.patch.object(owner, seam.name, other):
                said[str(seam)].append(tried())
    assert not compat_keras._repaired
    compat_keras.repair()
    assert len(keras_names.SEAMS) >= len(whole.owners)
    return keras.__version__, said


def test_a_keras_without_a_name_is_refused_by_one_error_and_nothing_is_replaced() -> None:
    ((version, said),) = run_ranks(futures, 1)
    assert len(said) > 60
    for name, errors in said.items():
        for error in errors:
            assert error.startswith(f"Keras {version} ") and f" {name} " in error, error
            assert "pip install" in error
    assert any("takes (something), not (grads)" in errors[-1] for errors in said.values())


def undone() -> Any:
    """A replacement that fails takes away those before it."""
    import keras

    from gradring.tensorflow.keras import compat_keras
    from gradring.tensorflow.seams import keras_names
    from gradring.tensorflow.seams.table import Replacement, replace

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        raise OSError("no such thing")

    before = [vars(keras.Model).get("fit"), vars(keras.Model).get("evaluate")]
    always = compat_keras._always
    replacements = [
        Replacement(keras_names.FIT, compat_keras._compile, always, lambda it: it),
        Replacement(keras_names.EVALUATE, compat_keras._compile, always, failing),
    ]
    with pytest.raises(OSError):
        replace([compat_keras.look()], replacements)
    after = [vars(keras.Model).get("fit"), vars(keras.Model).get("evaluate")]
    return [one is other for one, other in zip(before, after, strict=True)]


def test_replacements_are_all_made_or_none() -> None:
    assert run_ranks(undone, 1) == [[True, True]]


def newer() -> Any:
    """What this rank logs under a version above the tried ones."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    said = kept_lines()
    with join() as comm, mock.patch.object(keras, "__version__", "4.0.1"):
        for _ in range(2):
            with CustomCollectiveStrategy(communicator=comm).scope():
                keras.layers.Dense(1)
    return [line for line in said if "newer" in line]


def test_a_newer_keras_is_one_line_on_rank_0() -> None:
    of_chief, of_other = run_ranks(newer, 2)
    (line,) = of_chief
    told = "Keras 4.0.1 is newer than the versions that gradring was tried with"
    before, found, _ = line.partition(told)
    assert found and (not before or before.startswith("TensorFlow ")), line
    assert of_other == []


def test_each_stand_in_takes_what_keras_gives() -> None:
    """Where Keras may give more than the row says, the stand-in hands it on."""
    from gradring.tensorflow.keras import compat_keras

    for replacement in (*compat_keras._replacements(), *compat_keras._replacements_in_tf_keras()):
        parameters = inspect.signature(replacement.stand_in).parameters.values()
        kinds = {it.kind for it in parameters}
        hands_on = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
        assert hands_on or replacement.seam.takes is not None, replacement.seam
