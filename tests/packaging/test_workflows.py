"""The workflows, as far as they can be checked without GitHub: what their steps call exists.

`make lint` checks them against GitHub's schema, and that every action is pinned by its hash.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.documents import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCAL = {path.stem for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("release/*.py"))}


def of_cargo(key: str) -> str:
    """A line of Cargo.toml."""
    found = re.search(rf'^{key} = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def jobs() -> dict[str, Any]:
    """All jobs by their names, which are different."""
    found: dict[str, Any] = {}
    for workflow in WORKFLOWS:
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
            found[f"{workflow.stem}/{name}"] = job
    return found


def commands(job: Any) -> Iterator[str]:
    """What the steps of a job run."""
    for step in job["steps"]:
        if "run" in step:
            yield from re.split(r" && |\n", step["run"].strip())


ALL = sorted({command for job in jobs().values() for command in commands(job)})


@pytest.mark.parametrize("command", [command for command in ALL if command.startswith("make ")])
def test_a_target_of_make_exists(command: str) -> None:
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_every_action_is_pinned_by_the_hash_of_a_version_that_is_named() -> None:
    used = [line for w in WORKFLOWS for line in w.read_text().splitlines() if "uses:" in line]
    assert used
    for line in used:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
    versions = {line.partition("uses: ")[2] for line in used}
    assert len(versions) == len({version.partition("@")[0] for version in versions})


def test_the_oldest_rust_is_tried() -> None:
    version = of_cargo("rust-version")
    assert f"rustup toolchain install {version} --profile minimal" in ALL
    assert any(command.startswith(f"cargo +{version} ") for command in ALL)


@pytest.mark.parametrize(("tag", "code"), [("v" + of_cargo("version"), 0), ("v9.9.9", 1)])
def test_a_tag_that_is_not_the_version_stops_a_release(tag: str, code: int) -> None:
    (command,) = commands(jobs()["release/version"])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | {"GITHUB_REF_NAME": tag},
        stdout=subprocess.DEVNULL,
    )
    assert done.returncode == code
    assert "version" in jobs()["release/publish"]["needs"]


#: Says the titles of the open issues, and notes what it is asked to open.
STAND_IN_FOR_GH = """#!/usr/bin/env bash
case "$2" in
list) printf '%s\\n' "$OPEN" ;;
create) printf '%s\\n' "$@" >>opened; cat "${@: -1}" >>opened ;;
esac
"""
TITLE = "The next TensorFlow or Keras fails"


@pytest.mark.parametrize(
    ("open_issues", "opens"),
    [("", True), ("Something else", True), (f"Re: {TITLE}", True), (TITLE, False)],
)
def test_an_issue_is_opened_for_the_next_versions_once(
    open_issues: str, opens: bool, tmp_path: Path
) -> None:
    *_, command = commands(jobs()["next/next"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(STAND_IN_FOR_GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "next.md").write_text("failed: a test\n")
    subprocess.run(
        [ROOT / command],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OPEN": open_issues},
        check=True,
    )
    opened = tmp_path / "opened"
    assert opened.exists() == opens
    if opens:
        assert TITLE in opened.read_text() and "failed: a test" in opened.read_text()


def test_the_next_versions_are_blamed_only_if_what_is_released_passes() -> None:
    steps = [step for step in jobs()["next/next"]["steps"] if "run" in step]
    tried, released, issue = steps[-3:]
    assert (tried["run"], released["run"]) == ("make test-next", "make test-next RELEASED=1")
    assert tried["continue-on-error"] and "continue-on-error" not in released
    assert released["if"] == issue["if"] == "steps.next.outcome == 'failure'"


def test_the_job_that_uses_the_wheel_installs_what_its_tests_import() -> None:
    *_, install, test = commands(jobs()["release/test"])
    installed = {re.split(r"[<>=]", word)[0] for word in shlex.split(install)[4:]}
    assert " tests/packaging " in test
    tests = ROOT.glob("tests/packaging/*.py")
    imported = {name for path in tests for name in imports(ast.walk(tree(path)))}
    # Of what they import from here counts what it takes to be loaded.
    helpers = [ROOT / "tests" / "conftest.py"]
    for helper in helpers:
        imported.update(imports(tree(helper).body))
        found = [
            ROOT / place / f"{name}.py"
            for name in imported
            for place in ("tests/support", "release")
        ]
        helpers += [path for path in found if path.exists() and path not in helpers]
    imported -= LOCAL | sys.stdlib_module_names
    modules = {"pyyaml": {"yaml"}, "pytest": {"pytest", "_pytest"}}
    modules["pytest-timeout"] = {"pytest_timeout"}
    assert imported <= set().union(*(modules.get(name, {name}) for name in installed))


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_that_job_finds_the_wheel_that_was_built_for_its_processor(
    processor: str, tmp_path: Path
) -> None:
    tmp_path.joinpath("dist").mkdir()
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "musllinux_1_2_x86_64"):
        tmp_path.joinpath("dist", f"gradring-0.1.0-cp310-abi3-{platform}.whl").touch()
    *_, test = commands(jobs()["release/test"])
    pattern = test.partition("--wheel ")[2]
    found = subprocess.check_output(
        ["bash", "-c", f"echo {pattern}"],
        cwd=tmp_path,
        env=os.environ | {"PROCESSOR": processor},
        text=True,
    )
    assert found.strip() == f"dist/gradring-0.1.0-cp310-abi3-manylinux_2_28_{processor}.whl"


def test_the_wheel_for_musl_is_used_where_the_c_library_is_musl() -> None:
    build = [command for command in commands(jobs()["release/build"]) if "musl" in command]
    assert build[-1] == "make portable-wheel TARGET=x86_64-unknown-linux-musl"
    dry = [*shlex.split(build[-1]), "--dry-run"]
    made = subprocess.check_output(dry, cwd=ROOT, text=True)
    assert "--compatibility musllinux_1_2" in made
    (test,) = commands(jobs()["release/musl"])
    assert "alpine" in test and "/gradring-*-musllinux*.whl" in test
    assert "musl" in jobs()["release/publish"]["needs"]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The packages, modules of tests/support and modules of no package that statements import."""
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            of_support = [f"support.{alias.name}" for alias in node.names]
            names = of_support if node.module == "support" else [node.module]
        yield from {name.removeprefix("support.").partition(".")[0] for name in names}
