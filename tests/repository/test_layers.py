"""No module uses one that stands above or beside it in the drawings of ARCHITECTURE.md."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import pytest
from import_graph import Graph, circles, python_graph, rust_graph

from support.documents import ROOT

DIRECTORIES = (
    "rust/proto/src",
    "rust/net/src",
    "rust/core/src",
    "rust/servers/src",
    "python/gradring",
    "python/gradring/tensorflow",
)

#: Their own names stand before those of their modules.
PACKAGES = ("gradring", "tensorflow")


def layers(directory: str) -> list[list[str]]:
    """The drawing of a directory: on each line, names with commas, and what they are."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (drawing,) = re.findall(rf"^```text\n{directory}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line.split("  ")[0].split(", ") for line in drawing.splitlines()]


def graph_of(directory: Path) -> Graph:
    return rust_graph(directory) if directory.name == "src" else python_graph(directory)


def problems(graph: Graph, drawn: Sequence[Sequence[str]]) -> Iterator[str]:
    """What in a graph differs from a drawing, whose names may be those of parts, with dots."""
    place = {name: line for line, names in enumerate(drawn) for name in names}
    room = {module: _room(module, place) for module in graph if module != "lib"}
    for module in sorted(set(room.values()) ^ set(place)):
        yield f"{module} stands in the drawing or among the modules, but not in both"
    for module, other in sorted((m, o) for m, others in graph.items() for o in others):
        mine, its = room.get(module, module), room.get(other, other)
        if mine in place and mine != its and place[mine] >= place.get(its, 0):
            yield f"{module} uses {other}, but {its} stands above or beside {mine}"
    for circle in circles(graph):
        yield f"these use each other in a circle: {', '.join(circle)}"


def _room(module: str, drawn: Container[str]) -> str:
    """The name in the drawing that a module belongs to, or its first one if there is none."""
    parts = module.split(".")
    parts = parts[parts[0] in PACKAGES and len(parts) > 1 :]
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in drawn), names[-1])


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_no_module_uses_one_above_it_and_there_are_no_circles(directory: str) -> None:
    found = problems(graph_of(ROOT / directory), layers(directory))
    assert not (said := list(found)), "\n".join(said)


def test_no_crate_uses_one_above_it() -> None:
    """Cargo allows no circle; which crate may use which is the drawing's to say."""
    graph = {}
    for manifest in ROOT.glob("rust/*/Cargo.toml"):
        dependencies = manifest.read_text().partition("[dependencies]")[2].partition("\n[")[0]
        graph[manifest.parent.name] = set(
            re.findall(r"^gradring-(\w+)", dependencies, re.MULTILINE)
        )
    assert not (said := list(problems(graph, layers("rust")))), "\n".join(said)


@pytest.mark.parametrize("crate", ["python", "tensorflow"])
def test_the_bindings_have_no_circle(crate: str) -> None:
    assert not list(circles(rust_graph(ROOT / "rust" / crate / "src")))


PYTHON = {
    "__init__.py": "from gradring.high import high",
    "high.py": "from gradring import low",
    "low.py": "",
    "deep/__init__.py": "",
    "deep/a.py": "from gradring.deep.b import b",
    "deep/b.py": "import gradring.low",
}
RUST = {
    "lib.rs": "mod high;\nmod low;\n#[cfg(test)]\nmod simulation;",
    "high.rs": "use crate::low::{Low, deep::{a::A, b}}; mod part; use part::Part;",
    "high/part.rs": "use super::High;",
    "low/mod.rs": """//! use crate::high::High;
        pub const A: &str = "crate::high::A"; // '"'
        #[cfg(test)] mod tests { use crate::high::High; }
        const fn brace() -> char { '{' }""",
    "low/deep/a.rs": "use super::b::B;",
    "low/deep/b.rs": "#[cfg(test)] mod tests;",
    "low/deep/b/tests.rs": "use crate::high::High;",
    "simulation.rs": "use crate::high::High;",
}


def found_in(directory: Path, files: dict[str, str]) -> list[str]:
    """The problems of a package or a crate with these files."""
    is_rust = "lib.rs" in files
    source = directory / ("src" if is_rust else "gradring")
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    drawn = [["high"], ["low"]] if is_rust else [["gradring"], ["high", "deep"], ["low"]]
    return list(problems(graph_of(source), drawn))


def test_uses_below_are_no_problem_nor_are_those_of_tests(tmp_path: Path) -> None:
    assert found_in(tmp_path, PYTHON) == found_in(tmp_path, RUST) == []


@pytest.mark.parametrize(
    ("changed", "text", "said"),
    [
        ("low.py", "if TYPE_CHECKING:\n    from gradring.high import x", "above or beside low"),
        ("low.py", "def low():\n    from gradring import deep", "low uses gradring.deep, but deep"),
        ("high.py", "import gradring.deep.a", "deep stands above or beside high"),
        ("deep/b.py", "from gradring.deep import a", "a circle: gradring.deep.a, gradring.deep.b"),
        ("other.py", "", "other stands in the drawing or among the modules, but not in both"),
        ("low/deep/b.rs", "fn b() { crate::high::part::new() }", "low.deep.b uses high.part, but"),
        ("low/mod.rs", "use super::{low, high::High};", "high stands above or beside low"),
        ("low/deep/b.rs", "use super::a::A;", "in a circle: low.deep.a, low.deep.b"),
    ],
)
def test_what_points_up_or_closes_a_circle_is_found(
    changed: str, text: str, said: str, tmp_path: Path
) -> None:
    files = RUST if changed.endswith(".rs") else PYTHON
    assert said in "\n".join(found_in(tmp_path, {**files, changed: text}))
