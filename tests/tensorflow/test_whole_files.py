"""All ranks that save to one path at the same time leave one whole file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradring.testing import run_ranks
from support.tf_worker import join

RANKS, ROUNDS = 3, 4
KINDS = (
    "model.keras",
    "model.h5",
    "model.weights.h5",
    "exported",
    "saved_model",
    "written/checkpoint",
    "managed",
)


def ways(
    model: Any, directory: Path
) -> dict[str, tuple[Callable[[Path], Any], Callable[..., Any]]]:
    """By kind, how to save to a path and how to load what is there."""
    import keras
    import tensorflow as tf

    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(checkpoint, str(directory / "managed"), max_to_keep=2)

    def loaded(path: Path) -> Any:
        return keras.saving.load_model(path, compile=False)

    def read(path: Path) -> None:
        tf.train.Checkpoint(model=keras.models.clone_model(model)).read(str(path))

    def restored(path: Path) -> None:
        newest = tf.train.latest_checkpoint(str(path))
        assert newest is not None and Path(newest).parent == path
        read(Path(newest))

    return {
        "model.keras": (model.save, loaded),
        "model.h5": (model.save, loaded),
        "model.weights.h5": (model.save_weights, keras.models.clone_model(model).load_weights),
        "exported": (lambda path: model.export(str(path), verbose=False), tf.saved_model.load),
        "saved_model": (lambda path: tf.saved_model.save(model, str(path)), tf.saved_model.load),
        "written/checkpoint": (lambda path: checkpoint.write(str(path)), read),
        "managed": (lambda _: manager.save(), restored),
    }


def save_all(directory: Path) -> dict[str, str]:
    """Saves again and again to one path of each kind, and to a path of this rank alone."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    comm = join()
    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        inputs = keras.layers.Input((64,))
        hidden = keras.layers.Dense(300)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(300)(hidden))
    told = {}
    for kind, (save, load) in ways(model, directory).items():
        try:
            for _ in range(ROUNDS):
                comm.barrier()
                save(directory / kind)
                comm.barrier()
                load(directory / kind)
            told[kind] = "whole"
        except Exception as error:
            told[kind] = f"{type(error).__name__}: {error}"
            comm.abort(told[kind])
            break
    own = directory / f"rank-{comm.rank}.weights.h5"
    model.save_weights(own)
    told["own"] = str(own.stat().st_size > 0)
    # What must not be overwritten is not.
    own.write_bytes(b"mine")
    own.chmod(0o400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda *_: "n")
        model.save_weights(own, overwrite=False)
    told["kept"] = own.read_bytes().decode()
    told["others"] = saved_among_others(model, directory / f"rank-{comm.rank}")
    return told


def saved_among_others(model: Any, place: Path) -> str:
    """A model in a directory that has other files, the one that this process works in."""
    import tensorflow as tf

    others = [place / "notes", place / "variables" / "notes", place / "model.keras" / "notes"]
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for _ in range(2):
            tf.saved_model.save(model, ".")
            tf.saved_model.load(".")
        model.export(str(place), verbose=False)
        with pytest.raises(IsADirectoryError, match=r"model\.keras"):
            model.save("model.keras")
    assert not [path for path in place.iterdir() if path.name.startswith(".")]
    return " ".join(file.read_text() for file in others)


def test_saves_of_all_ranks_to_one_path_are_whole(tmp_path: Path) -> None:
    for told in run_ranks(save_all, RANKS, tmp_path):
        own = {"own": "True", "kept": "mine", "others": "mine mine mine"}
        assert told == {**dict.fromkeys(KINDS, "whole"), **own}
    names = {path.name for path in tmp_path.iterdir()}
    assert not [name for name in names if name.startswith(".")], "a workspace was left"
