"""The crates that can be published: what their pages and packages have."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from support.documents import ROOT

PUBLISHED = ("gradring-proto", "gradring-net", "gradring-core")


@pytest.fixture(scope="module")
def packages() -> dict[str, Any]:
    """Our crates by name, as cargo reads their manifests."""
    command = ["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]
    found = json.loads(subprocess.check_output(command, cwd=ROOT))["packages"]
    return {package["name"]: package for package in found}


def test_those_that_core_needs_are_published_with_it_and_no_others(packages: Any) -> None:
    may = {name for name, package in packages.items() if package["publish"] is None}
    assert may == set(PUBLISHED)
    for name in PUBLISHED:
        ours = [d for d in packages[name]["dependencies"] if d["name"].startswith("gradring-")]
        # Those for tests alone have no version: cargo leaves them out of a package.
        needed = {d["name"]: d["req"] for d in ours if d["kind"] is None}
        assert set(needed) <= may
        assert set(needed.values()) <= {f"={packages[name]['version']}"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_of_a_crate_has_all_that_the_index_shows(packages: Any, name: str) -> None:
    package = packages[name]
    for key in ("description", "license", "repository", "readme", "rust_version", "authors"):
        assert package[key], key
    assert 0 < len(package["keywords"]) <= 5 and package["categories"]
    assert package["metadata"]["docs"]["rs"]["targets"] == ["x86_64-unknown-linux-gnu"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_package_holds_its_sources_its_page_and_its_licence(name: str) -> None:
    command = ["cargo", "package", "--list", "--locked", "--allow-dirty", "--package", name]
    files = set(subprocess.check_output(command, cwd=ROOT, text=True).split())
    assert {"src/lib.rs", "Cargo.toml", "README.md", "LICENSE"} <= files
    folder = ROOT / "rust" / name.removeprefix("gradring-")
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_program_of_cores_page_is_the_one_that_rustdoc_tests() -> None:
    core = ROOT / "rust" / "core"
    documented = "\n".join(
        line.removeprefix("//!").removeprefix(" ")
        for line in (core / "src" / "lib.rs").read_text().splitlines()
        if line.startswith("//!")
    )
    (tested,) = re.findall(r"```no_run\n(.*?)```", documented, re.DOTALL)
    shown = [line for line in tested.splitlines() if not re.match("# |#$", line)]
    (program,) = re.findall(r"```rust\n(.*?)```", (core / "README.md").read_text(), re.DOTALL)
    assert program.splitlines() == shown
