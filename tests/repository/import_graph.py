"""The graph of imports, read from the sources: nothing is imported or compiled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

#: By module, those that it imports; names are paths with dots.
Graph = Mapping[str, set[str]]

#: Comments, strings and characters of Rust; lifetimes are none.
_NOISE = re.compile(
    r"""(?P<comment>//[^\n]* | /\*.*?\*/)
    | b?r(?P<hashes>\#*)".*?"(?P=hashes) | b?"(?:\\.|[^"\\])*" | b?'(?:\\.[^']*|[^'\\])'""",
    re.DOTALL | re.VERBOSE,
)
#: What is compiled for tests only, and what a module says so of itself.
_TEST_ITEM = re.compile(r"#\[cfg\((?:(?:all|any)\()?test\b[^\]]*\]")
_ALL_TESTS = re.compile(_TEST_ITEM.pattern.replace("#", "#!", 1))
#: A module in another file that is.
_TESTS = re.compile(_TEST_ITEM.pattern + r"\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))? )?mod (\w+);")


def python_graph(package: Path) -> Graph:
    """The modules of a package; its directories stand for their ``__init__`` files.

    An import counts wherever it stands: also in a function, or for types only. One of a module
    around the package does not.
    """
    outer = package
    while (outer.parent / "__init__.py").exists():
        outer = outer.parent
    around = ".".join((*package.relative_to(outer.parent).parts[:-1], ""))
    sources = (path for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi"))
    files = {_name(path.relative_to(outer.parent)): path for path in sources}
    return {
        name.removeprefix(around): {
            imported.removeprefix(around) for imported in _python_imports(name, path, files)
        }
        for name, path in files.items()
    }


def _python_imports(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} has a relative import"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for imported in found:
            # What is no module is a name in one.
            module = imported if imported in files else imported.rpartition(".")[0]
            if module in files and module != name:
                yield module


def rust_graph(source: Path) -> Graph:
    """The modules of a crate; ``lib`` is its root.

    A module may use what the modules around it say: that is no import here.
    """
    texts = rust_product(source)
    return {name: set(_rust_imports(name, text, texts)) for name, text in texts.items()}


def rust_product(source: Path) -> dict[str, str]:
    """The modules of a crate without tests, comments, and the content of literals."""
    texts = {
        _name(path.relative_to(source)): _NOISE.sub(_quiet, path.read_text())
        for path in source.rglob("*.rs")
    }
    for name, text in list(texts.items()):
        inside = "" if name == "lib" else f"{name}."
        tests = [f"{inside}{module}." for module in _TESTS.findall(text)]
        if _ALL_TESTS.search(text):
            tests.append(inside)
        for module in [m for m in texts if f"{m}.".startswith(tuple(tests))]:
            del texts[module]
    return {name: _without_tests(text) for name, text in texts.items()}


def _quiet(noise: re.Match[str]) -> str:
    """Nothing for a comment, and for a literal an empty one on each of its lines."""
    return "" if noise["comment"] else re.sub(".+", '""', noise[0])


def _rust_imports(name: str, text: str, modules: Mapping[str, str]) -> Iterator[str]:
    here = [] if name == "lib" else name.split(".")
    children = "|".join(re.findall(r"\bmod (\w+);", text)) or "self"
    for match in re.finditer(
        rf"(?<![\w:])(?:(crate)|((?:super::)*super)|self|({children}))::", text
    ):
        base = [] if match[1] else here[: len(here) - (match[2] or "").count("super")]
        for path in _paths(text, match.end()):
            parts = [*base, *filter(None, [match[3]]), *path]
            while parts and ".".join(parts) not in modules:
                parts.pop()
            module = ".".join(parts) or "lib"
            if not f"{name}.".startswith(f"{module}."):
                yield module


def _paths(text: str, at: int) -> Iterator[list[str]]:
    """The paths of a tree such as ``a::{b, c::{d, e}}`` that begins at a place in a text."""
    match = re.compile(r"\s*(\w*)(::)?").match(text, at)
    assert match is not None
    if match[1] and match[2]:
        yield from ([match[1], *rest] for rest in _paths(text, match.end()))
    elif not match[1] and text.startswith("{", match.end()):
        depth, begin = 0, match.end() + 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0 or (depth == 1 and text[end] == ","):
                yield from _paths(text, begin)
                begin = end + 1
            if depth == 0:
                return
    else:
        yield [match[1]] if match[1] else []


def _without_tests(text: str) -> str:
    while match := _TEST_ITEM.search(text):
        depth = 0
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0 and text[end] in ";}":
                break
        text = text[: match.start()] + text[end + 1 :]
    return text


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "mod") else parts)


def circles(graph: Graph) -> list[list[str]]:
    """The largest sets of modules in which each leads to every other one."""
    reached = {module: _reached(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in graph if other in there and module in reached[other]))
        for module, there in reached.items()
        if module in there
    }
    return [list(circle) for circle in sorted(found)]


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += graph.get(module, ())
    return found
