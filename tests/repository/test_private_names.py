"""Private names of TensorFlow and Keras stand in tables, and in the files that read these."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from support.documents import ROOT

PACKAGE = ROOT / "python" / "gradring"
#: The tables, and what gives others what is in them.
TABLES = (
    "tensorflow/seams/tensorflow_names.py",
    "tensorflow/graph/compat.py",
    "tensorflow/seams/keras_names.py",
    "tensorflow/keras/compat_keras.py",
)
#: The folders that use TensorFlow and Keras.
FOLDERS = ("tensorflow", "horovod")
#: By file, names that stand there all the same.
ELSEWHERE = {
    # Attributes of ours that are called like some of theirs.
    "horovod/tensorflow/optimizer.py": {"_options"},
    "tensorflow/elastic.py": {"_state"},
    # The sign of tf_keras.
    "tensorflow/graph/model_variables.py": {"_built"},
    # What programs that nobody changes ask of Keras.
    "tensorflow/stand_ins/given_strategy.py": {
        "keras.src.backend.config",
        "keras.src.distribution.distribution_lib",
    },
}
_MODULE = re.compile(r"(tensorflow\.(python|core|compiler)|(tf_)?keras\.src)\b")
#: A method of named tuples is public.
_PRIVATE = re.compile(r"_(?!replace\b)[a-zA-Z0-9]\w*")
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """Private names that our own code gives to something."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Call(
                func=ast.Attribute(value=ast.Name("object"), attr="__setattr__"),
                args=[ast.Name("self"), ast.Constant(value=name), _],
            ):
                found.add(str(name))
    return found


def listed(tables: Iterable[ast.Module]) -> set[str]:
    """Private names in the texts of tables."""
    nodes = (node for tree in tables for node in ast.walk(tree))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {name for text in texts for name in _PRIVATE.findall(str(text))}


def private(tree: ast.Module, ours: set[str], rows: set[str]) -> Iterator[str]:
    """Private names in a file that are not ours: attributes, texts of attributes, and modules.

    A class of ours may use those of its parent that have a row.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if _MODULE.match(each.name))
            case ast.ImportFrom(module=str(module)) if _MODULE.match(module):
                yield module
            case ast.Constant(value=str(text)) if re.fullmatch(_MODULE.pattern + r"[\w.]*", text):
                yield text
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name) if name in ours | rows:
                pass
            case ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=name):
                pass
            case ast.Attribute(attr=name) if _is_theirs(name, ours - rows):
                yield name
            case ast.Call(func=ast.Name(id=by), args=[_, ast.Constant(value=str(name)), *_]):
                if by in _BY_NAME and _is_theirs(name, ours - rows):
                    yield name


def _is_theirs(name: str, ours: set[str]) -> bool:
    is_private = _PRIVATE.fullmatch(name) is not None
    return is_private and name not in ours and not name.startswith("_gradring")


def found_in(package: Path) -> dict[str, set[str]]:
    """By file of a package, the private names of others outside of the tables."""
    trees = {
        path.relative_to(package).as_posix(): ast.parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
    }
    ours = defined(trees.values())
    rows = listed(trees[name] for name in TABLES if name in trees)
    found = {
        name: set(private(tree, ours, rows))
        for name, tree in trees.items()
        if name.startswith(FOLDERS) and name not in TABLES
    }
    return {name: names for name, names in found.items() if names}


def test_private_names_of_others_stand_in_the_tables() -> None:
    assert found_in(PACKAGE) == ELSEWHERE


def test_private_names_are_found(tmp_path: Path) -> None:
    package = tmp_path / "tensorflow"
    (package / "seams").mkdir(parents=True)
    (package / "seams" / "tensorflow_names.py").write_text(
        "ROWS = 'Graph', '_in_a_row _inherited'\n"
    )
    (package / "ours.py").write_text(
        "class Own(Theirs):\n"
        "    def __init__(self):\n        self._own = self._in_a_row = self._inherited()\n"
        "    def _method(self): ...\n"
        "def f(own): own._own, own._method(), own.__dict__, getattr(own, '_gradring_x')\n"
    )
    assert found_in(tmp_path) == {}
    (package / "theirs.py").write_text(
        "import tensorflow.python.eager\nfrom keras.src.losses import loss\nimport sys\n"
        "def f(other):\n    other._theirs = sys.modules['tf_keras.src.utils']\n"
        "    return hasattr(other, '_asked') or other._in_a_row\n"
    )
    modules = {"keras.src.losses", "tensorflow.python.eager", "tf_keras.src.utils"}
    assert found_in(tmp_path) == {
        "tensorflow/theirs.py": {"_asked", "_in_a_row", "_theirs", *modules}
    }
