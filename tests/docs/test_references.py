"""Commands, targets, names of the API and tests that the documents name in their text exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradring.tools import cli
from support.documents import DOCUMENTS, ROOT, make_targets

PACKAGE = ROOT / "python" / "gradring"
FOLDERS = ("rust", "python", "tests", "benches", "docs", "examples", "release", "fuzz")
#: Files that an exercise of docs/internals/exercises.md would add.
HYPOTHETICAL = {
    "python/gradring/tensorflow/rules/majority_vote.py",
    "rust/core/src/forming/ping.rs",
    "rust/proto/src/schedule/chain.rs",
}


def codes(document: Path) -> Iterator[str]:
    """What stands in backquotes, apart from blocks."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    return iter(re.findall(r"`([^`\n]+)`", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_the_text_names_exists(document: Path) -> None:
    for code in codes(document):
        words = code.split()
        if words[0] == "gradring" and re.fullmatch("[a-z]+", "".join(words[1:2])):
            assert words[1] in cli.COMMANDS, code
        elif words[0] == "make" and len(words) > 1:
            assert words[1] in make_targets(), code
        elif code.startswith("gradring."):
            assert exists(PACKAGE, re.split(r"[^\w.]", code)[0].split(".")[1:]), code


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_the_text_names_exist(document: Path) -> None:
    missing = {code for code in codes(document) if is_path(code) and not is_there(code)}
    assert missing <= HYPOTHETICAL, missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_the_text_names_exist(document: Path) -> None:
    missing = {
        code for code in codes(document) if re.fullmatch(r"test_\w+", code)
    } - names_of_tests()
    assert not missing, missing


@functools.cache
def names_of_tests() -> set[str]:
    """All functions and files of Python's tests."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benches").rglob("*.py")]
    found = (re.findall(r"def (test_\w+)", file.read_text()) for file in files)
    # The last one is a method of TensorFlow's own tests.
    return {file.stem for file in files}.union(*found, {"test_session"})


def test_types_and_functions_that_the_architecture_names_exist() -> None:
    pages = (ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "internals").glob("*.md")))
    named = {code for page in pages for code in codes(page) if re.fullmatch(r"\w+::\w+", code)}
    assert len(pages) > 5 and named
    missing = {code for code in named if not all(map(is_in_rust, code.split("::")))}
    assert not missing, missing


def test_each_invariant_of_the_architecture_has_a_test() -> None:
    rows = re.findall(r"^\| \d+ \|.*\| `(\w+)` \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    tests_in_rust = re.findall(r"#\[test\]\s+fn (\w+)\(", "".join(rust_sources().values()))
    assert len(rows) == 16 and set(rows) <= names_of_tests().union(tests_in_rust)


def test_a_file_that_does_not_exist_is_found_out() -> None:
    for path in ("rust/core/src/engine.rs", "forming/peers.rs", "peers.rs", "tests/docs/"):
        assert is_path(path) and is_there(path), path
    for path in ("rust/core/src/engines.rs", "forming/pairs.rs", "rust/none/"):
        assert is_path(path) and not is_there(path), path
    assert not is_path("train.py") and not is_path("int32/uint8")


def is_path(code: str) -> bool:
    """Whether it is meant as a file or folder of this repository: programs of users are not."""
    if re.fullmatch(r"[\w./-]+\.rs", code):
        return True
    return re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*", code) is not None


def is_there(path: str) -> bool:
    """Whether it is a path from the root, or the end of one of a source in Rust."""
    if (ROOT / path).exists():
        return True
    return any(f"/{source}".endswith(f"/{path}") for source in rust_sources())


@functools.cache
def rust_sources() -> dict[str, str]:
    """Contents by path from the root."""
    sources = (ROOT / "rust").rglob("*.rs")
    return {str(source.relative_to(ROOT)): source.read_text() for source in sources}


def is_in_rust(name: str) -> bool:
    return any(re.search(rf"\b{name}\b", source) for source in rust_sources().values())


def exists(place: Path, names: list[str]) -> bool:
    """Whether a name can be reached from a package or a module; reads, and imports nothing."""
    if not names:
        return True
    name, *rest = names
    if (place / name).is_dir() or (place / f"{name}.py").is_file():
        return exists(place / name, rest)
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    # Attributes of classes are left to the API's page.
    return name in top_level(ast.parse(source.read_text()))


def top_level(module: ast.Module | ast.If) -> set[str]:
    found = set()
    for node in module.body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.If):
            # What is imported when it is first used stands there for type checkers.
            found |= top_level(node)
    return found


def test_a_name_that_does_not_exist_is_found_out() -> None:
    assert exists(PACKAGE, ["tensorflow", "callbacks", "LiveLine"])
    assert exists(PACKAGE, ["errors", "PeerLostError"])
    assert not exists(PACKAGE, ["tensorflow", "Reducer"])
    assert not exists(PACKAGE, ["initialise"])


def test_the_pages_ask_for_the_rust_that_the_crates_need() -> None:
    (needed,) = re.findall(r'^rust-version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)
    for document in ("README.md", "docs/quick-start.md"):
        asked = re.findall(r"Rust (\d[\d.]*\d)", (ROOT / document).read_text())
        assert set(asked) == {needed}, document


def test_the_tests_that_hold_a_claim_exist() -> None:
    in_rust = re.findall(r"\bfn (\w+)\(", "\n".join(rust_sources().values()))
    numerics = ROOT / "docs" / "numerics.md"
    named = {code for code in codes(numerics) if re.fullmatch("([a-z0-9]+_){3,}[a-z0-9]+", code)}
    assert len(named) > 20
    assert not (missing := named - names_of_tests().union(in_rust)), missing
