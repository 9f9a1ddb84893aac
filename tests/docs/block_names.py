"""Names that a block of Python uses, and a fresh interpreter that looks them up.

Run as a program, it reads a list of (imports, chains) as JSON from its standard input, and writes
for each the chains that do not lead anywhere after those imports alone. Each is looked up in a
process of its own, which knows no module of gradring before: what one block imports helps no other.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

DEADLINE_S = 240
#: Imported before the processes part if one needs it: each would take seconds for them.
EXPENSIVE = ("numpy", "tensorflow", "keras")


def imports_of(source: str) -> str:
    """The import statements of a block, wherever they stand in it."""
    nodes = ast.walk(ast.parse(source))
    return "\n".join(ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))


def chains_of(source: str) -> list[str]:
    """What starts at an imported name, such as ``gradring.errors.PeerLostError``."""
    tree = ast.parse(source)
    imported = set(_imported(tree))
    chains = {chain for node in ast.walk(tree) if (chain := _chain(node))}
    return sorted(chain for chain in chains if chain.split(".")[0] in imported)


def unknown_names(source: str, given: Iterable[str] = ()) -> set[str]:
    """Bare names that the block neither defines nor imports, and that nobody gives to it."""
    tree = ast.parse(source)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return used - set(_defined(tree)) - set(_imported(tree)) - set(dir(builtins)) - set(given)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0]


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
    yield "__file__"


def _chain(node: ast.AST) -> str | None:
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def look_up(blocks: list[tuple[str, list[str]]]) -> list[list[str]]:
    """For each block's imports and chains, what does not exist after them."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps(blocks),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    ).stdout
    return [list(missing) for missing in json.loads(found)]


def _missing(imports: str, chains: list[str]) -> list[str]:
    names: dict[str, Any] = {}
    missing = []
    for statement in imports.splitlines():
        try:
            exec(statement, names)
        except ImportError as error:
            if (error.name or "gradring").split(".")[0] == "gradring":
                missing.append(f"{statement}: {error}")
            chains = _without(statement, chains, names)
    return missing + [chain for chain in chains if not _leads_somewhere(names, chain)]


def _without(statement: str, chains: list[str], names: dict[str, Any]) -> list[str]:
    """The chains that do not need a statement which failed, as where Ray is not installed."""
    node = ast.parse(statement).body[0]
    assert isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names:
        bound = alias.asname or alias.name
        package = bound.split(".")[0]
        if package in sys.modules:
            names[package] = sys.modules[package]
        unknown = bound if package in sys.modules else package
        chains = [chain for chain in chains if not f"{chain}.".startswith(f"{unknown}.")]
    return chains


def _leads_somewhere(names: dict[str, Any], chain: str) -> bool:
    first, *rest = chain.split(".")
    if first not in names:
        return False
    found = names[first]
    for name in rest:
        # Attributes of other objects may come into being when the program runs.
        if not isinstance(found, ModuleType | type):
            break
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _apart(imports: str, chains: list[str]) -> list[str]:
    """`_missing` in a process of its own."""
    reading, writing = os.pipe()
    if not os.fork():
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(_missing(imports, chains), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.wait()
    return list(json.loads(said))


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    for module in EXPENSIVE:
        if any(module in imports for imports, _ in asked):
            __import__(module)
    assert not any(name.split(".")[0] == "gradring" for name in sys.modules)
    json.dump([_apart(*block) for block in asked], sys.stdout)
