"""TensorFlow's private names: a later version may rename one, or call it in another way."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow import strategy
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.cross_device_ops import RingCrossDeviceOps
from gradring.tensorflow.seams import table as seams
from gradring.tensorflow.seams.table import Found, Replacement, Seam
from gradring.tensorflow.seams.tensorflow_names import TABLE

FUNCTIONS = [seam for seam in TABLE if seam.takes]
OVERRIDES = {
    kind: [seam.name for seam in found.owners]
    for kind, found in zip((RingCrossDeviceOps, strategy._Extended), seams.OVERRIDDEN, strict=True)
}
EACH_OVERRIDE = [(kind, name) for kind, names in OVERRIDES.items() for name in names]


def is_told(found: Found, seam: Seam, why: str) -> None:
    """Asserts that a row is known to be wrong, which refuses to train or is documented."""
    if seam.without:
        assert found.absent == {seam: why}
        found.check()
        return
    # With a class, its attributes are gone.
    assert {each.key: it for each, it in found.missing.items()}[seam.key] == why
    with pytest.raises(ConfigError) as raised:
        found.check()
    told = str(raised.value)
    assert told.startswith(f"TensorFlow {tf.__version__} differs from the versions that")
    assert f"{seam} {why}" in told
    assert ". Nothing in it was replaced. Install one of those: pip install" in told


def test_this_version_has_all_rows_and_each_has_a_key_of_its_own() -> None:
    assert len({seam.key for seam in TABLE}) == len(TABLE) == len(compat.FOUND.owners)
    assert not compat.FOUND.missing
    assert not compat.FOUND.absent


@pytest.mark.parametrize("seam", TABLE, ids=lambda seam: seam.key)
def test_a_name_that_is_gone_is_told(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = compat.FOUND.owners[seam]
    rows = list(TABLE)
    if seam.name in vars(owner) and not seam.is_attribute and not hasattr(object, seam.name):
        monkeypatch.delattr(owner, seam.name)
        # A class that it inherits from may have it, too.
        if hasattr(owner, seam.name):
            monkeypatch.undo()
            rows[rows.index(seam)] = seam = dataclasses.replace(seam, name=f"{seam.name}_renamed")
    else:
        rows[rows.index(seam)] = seam = dataclasses.replace(seam, name=f"{seam.name}_renamed")
    found = seams.find("tensorflow", rows)
    monkeypatch.undo()
    is_told(found, seam, "is missing")


@pytest.mark.parametrize("seam", FUNCTIONS, ids=lambda seam: seam.key)
def test_a_function_with_other_parameters_is_told(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seam.takes is not None

    def another(self: Any, another: Any) -> None: ...

    monkeypatch.setattr(compat.FOUND.owners[seam], seam.name, another)
    found = seams.find("tensorflow", TABLE)
    monkeypatch.undo()
    is_told(found, seam, f"takes (another), not ({', '.join(seam.takes.split())})")


def parent_of(kind: type, **changed: Any) -> type:
    """A parent like TensorFlow's, with other methods; None: without one."""
    (theirs, *_) = kind.__bases__
    methods = {name: inspect.getattr_static(theirs, name) for name in OVERRIDES[kind]} | changed
    members = {name: method for name, method in methods.items() if method is not None}
    return type(theirs.__name__, (), {**members, "__module__": theirs.__module__})


@pytest.mark.parametrize(("kind", "name"), EACH_OVERRIDE)
def test_an_override_of_a_method_that_is_gone_is_refused(
    kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "OVERRIDDEN", [])
    assert seams.overrides(parent_of(kind), *OVERRIDES[kind])(kind) is kind
    with pytest.raises(ConfigError, match=rf"TensorFlow {tf.__version__}.*{name} is missing"):
        seams.overrides(parent_of(kind, **{name: None}), *OVERRIDES[kind])(kind)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, name in EACH_OVERRIDE if callable(vars(kind)[name])]
)
def test_an_override_of_a_method_with_other_parameters_is_refused(
    kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "OVERRIDDEN", [])

    def another(self: Any, first: Any, second: Any, *, another: Any) -> None: ...

    with pytest.raises(ConfigError, match=rf"{name} takes \(self, first, second, another\), not"):
        seams.overrides(parent_of(kind, **{name: another}), *OVERRIDES[kind])(kind)


def test_an_override_that_is_not_listed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"overrides \['_all_reduce',.* does not say so"):
        seams.overrides(compat.CollectiveAllReduce, "_batch_all_gather")(RingCrossDeviceOps)


def test_all_is_replaced_or_nothing() -> None:
    class Owner:
        def first(self) -> int:
            return 1

        def second(self) -> int:
            return 2

    def fails(function: Any) -> Any:
        raise RuntimeError("no")

    rows = [Seam(f"{__name__}:Owner", name, "is replaced", "") for name in ("first", "second")]
    there = Found("tensorflow", tf.__version__, dict.fromkeys(rows, Owner))
    stand_ins = [
        Replacement(row, lambda original, self: -original(self), lambda *_: True, lambda it: it)
        for row in rows
    ]
    before = dict(vars(Owner))
    with pytest.raises(RuntimeError):
        seams.replace([there], [stand_ins[0], dataclasses.replace(stand_ins[1], wrap=fails)])
    assert dict(vars(Owner)) == before
    missing = Found("tensorflow", tf.__version__, {rows[0]: Owner}, {rows[1]: "is missing"})
    with pytest.raises(ConfigError):
        seams.replace([missing], stand_ins)
    assert dict(vars(Owner)) == before
    seams.replace([there], stand_ins)
    assert (Owner().first(), Owner().second()) == (-1, -2)


RENAMED = """
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.distribute import input_lib
del input_lib._calculate_replicas_with_values, input_lib.DistributedDatasetsFromFunction
del dataset_ops.DatasetV2._inputs
before = iterator_ops.OwnedIterator.__init__
try:
    import gradring.tensorflow
except Exception as error:
    print(type(error).__name__, error)
print(iterator_ops.OwnedIterator.__init__ is before)
"""


def test_the_import_tells_all_names_that_are_gone_in_one_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RENAMED], check=True, capture_output=True, text=True, timeout=300
    )
    told, is_as_before = done.stdout.splitlines()
    assert told.startswith(f"ConfigError TensorFlow {tf.__version__} differs from the versions")
    for name in (
        "_calculate_replicas_with_values",
        "input_lib.DistributedDatasetsFromFunction",
        "DatasetV2._inputs",
    ):
        assert f"{name} is missing" in told
    assert is_as_before == "True"


IMPORTED = """
import sys
import types

import keras
import tensorflow as tf

tf.keras, tf.compat.v1.Session, tf.distribute.MultiWorkerMirroredStrategy


def attributes():
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("keras", "tensorflow", "tf_keras"):
            for owner in (module, *filter(lambda it: isinstance(it, type), vars(module).values())):
                where = getattr(owner, "__qualname__", "")
                for attribute, value in list(vars(owner).items()):
                    if not isinstance(value, types.ModuleType):
                        yield (name, where, attribute), value


before = dict(attributes())
there = {name for name, _, _ in before}
import gradring.horovod.tensorflow
import gradring.tensorflow
import gradring.tensorflow.callbacks
import gradring.tensorflow.elastic

gradring.tensorflow.GradientReducer
after = {name: value for name, value in attributes() if name[0] in there}
changed = [name for name, value in after.items() if before.get(name, before) is not value]
print(len(before), "".join(sorted(map(str, changed))))
"""


def test_the_import_replaces_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True, timeout=300
    )
    count, changed = done.stdout.split(" ", 1)
    assert int(count) > 10_000
    assert changed.strip() == ""
