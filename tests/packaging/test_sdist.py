"""The source distribution: what it holds, and that it is enough to build from."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from environments import environment_of
from packaging.requirements import Requirement
from packaging.version import Version

import index_page
import licences
import recipes
from support.documents import ROOT

PROGRAM = """\
import gradring
import numpy

with gradring.init() as comm:
    print(comm.all_reduce(numpy.ones(2)).tolist(), gradring.build_info()["debug"])
"""


def extracted(sdist: Path, name: str) -> str:
    with tarfile.open(sdist) as archive:
        (path,) = (path for path in archive.getnames() if path.partition("/")[2] == name)
        file = archive.extractfile(path)
        assert file is not None
        return file.read().decode()


def files(wheel: Path) -> dict[str, str]:
    """The digests of all that a wheel installs, without the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def spack_package(text: str) -> dict[str, Any]:
    """Attributes of the class in a recipe for Spack, and the arguments of each directive."""
    spack, build_systems = ModuleType("spack.package"), ModuleType("python")
    told: dict[str, Any] = {}
    for directive in ("conflicts", "depends_on", "license", "version"):

        def tell(*words: Any, _of: str = directive, **named: Any) -> None:
            told.setdefault(_of, []).append((words, named))

        setattr(spack, directive, tell)
    build_systems.PythonPackage = type("PythonPackage", (), {})  # type: ignore[attr-defined]
    modules = {
        "spack": ModuleType("spack"),
        "spack.package": spack,
        "spack_repo": ModuleType("spack_repo"),
        "spack_repo.builtin": ModuleType("builtin"),
        "spack_repo.builtin.build_systems": ModuleType("build_systems"),
        "spack_repo.builtin.build_systems.python": build_systems,
    }
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        exec(compile(text, "package.py", "exec"), names)
    package = names["PyGradring"]
    assert issubclass(package, build_systems.PythonPackage) and package.__doc__
    return {**vars(package), **told}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sdist")
    subprocess.run(
        [sys.executable, "-m", "maturin", "sdist", "--out", directory],
        cwd=ROOT,
        env=os.environ | {"SOURCE_DATE_EPOCH": "1800000000"},
        check=True,
    )
    (path,) = directory.glob("gradring-*.tar.gz")
    index_page.main(str(path))
    return path


def test_it_holds_what_is_needed_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    crates = {f"rust/{crate}/Cargo.toml" for crate in ("core", "tensorflow", "python")}
    crates |= {f"rust/{crate}/LICENSE" for crate in ("proto", "net", "core")}
    alone = {"PKG-INFO", "README.md", "Cargo.lock", "Cargo.toml", "pyproject.toml"}
    alone |= {"LICENSE", "THIRD-PARTY-LICENSES.txt"}
    alone |= {f"python/gradring_start/{name}.py" for name in ("__init__", "chance", "no_chief")}
    alone.add("python/data/purelib/gradring_start.pth")
    assert alone | crates <= names
    others = {name for name in names if not name.startswith(("rust/", "python/gradring/"))}
    assert others == alone
    assert {Path(name).suffix for name in names - alone - crates} <= {
        ".css",
        ".html",
        ".json",
        ".md",
        ".mplstyle",
        ".py",
        ".pyi",
        ".rs",
        ".toml",
        ".typed",
    }


def test_its_page_on_the_index_has_absolute_links(sdist: Path) -> None:
    assert "](docs/" not in extracted(sdist, "PKG-INFO")
    assert extracted(sdist, "README.md") == (ROOT / "README.md").read_text()
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", sdist], check=True)


def test_its_bytes_do_not_depend_on_when_it_is_built(sdist: Path) -> None:
    assert sdist.read_bytes()[4:8] == bytes(4)  # the time in gzip's header
    with tarfile.open(sdist) as archive:
        assert len({member.mtime for member in archive.getmembers()}) == 1
    built = sdist.read_bytes()
    index_page.main(str(sdist))
    assert sdist.read_bytes() == built


def test_recipes_of_others_are_of_this_distribution_and_ask_for_what_it_asks(sdist: Path) -> None:
    made = recipes.recipes(sdist)
    assert not [text for text in made.values() if re.search(r"@\w+@", text)]
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    conda = yaml.safe_load(made["recipe.yaml"])
    assert conda["source"]["sha256"] == digest
    version = conda["context"]["version"]
    assert sdist.name == f"gradring-{version}.tar.gz"
    easybuild: dict[str, Any] = {"SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
    exec(made[f"gradring-{version}-gfbf-2025b.eb"], easybuild)
    assert easybuild["version"] == version
    first, *others = easybuild["checksums"]
    assert first == {sdist.name: digest}
    assert [f"{name}-{number}.tar.gz" for name, number in easybuild["crates"]] == [
        name for entry in others for name in entry
    ]
    spack = spack_package(made["py_gradring/package.py"])
    assert spack["version"] == [((version,), {"sha256": digest})]
    assert spack["pypi"] == f"gradring/{sdist.name}"
    linked = {(crate.name, crate.version) for crate in licences.crates()}
    assert linked and linked <= set(easybuild["crates"])
    # What the project itself says.
    metadata = Parser().parsestr(extracted(sdist, "PKG-INFO"))
    run, host = (conda["requirements"][kind] for kind in ("run", "host"))
    assert f">={conda['context']['python_min']}" == metadata["Requires-Python"]
    assert run[1].replace(" ", "") == metadata.get_all("Requires-Dist", [])[0]
    (maturin,) = re.findall(r'^requires = \["(.+)"\]$', extracted(sdist, "pyproject.toml"), re.M)
    assert host[-1].replace(" ", "") == maturin
    (rust,) = re.findall(r'^rust-version = "(.+)"$', extracted(sdist, "Cargo.toml"), re.M)
    tools = dict(easybuild["builddependencies"])
    assert Version(tools["Rust"]) >= Version(rust)
    assert tools["maturin"] in Requirement(maturin).specifier
    needed = {of.partition("@")[0]: (of, how["type"]) for (of,), how in spack["depends_on"]}
    both = ("build", "run")
    assert needed == {
        "python": (f"python@{conda['context']['python_min']}:", both),
        "py-numpy": (f"py-{run[1].replace(' >=', '@')}:", both),
        "c": ("c", "build"),
        "py-maturin": ("py-maturin@1.9:1", "build"),
        "rust": (f"rust@{rust}:", "build"),
    }
    # Spack's 1.9:1 has all versions up to 2.
    assert maturin == "maturin>=1.9,<2"
    assert spack["license"][0][0] == (metadata["License-Expression"],)
    assert spack["homepage"] == conda["about"]["homepage"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiles everything
def test_it_builds_into_the_same_package_bit_for_bit(sdist: Path, wheel: Path) -> None:
    # The compilers of this shell, and nothing else of it.
    compilers = ("PATH", "CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN")
    variables = {name: os.environ[name] for name in compilers if name in os.environ}
    with environment_of() as clean:
        built = clean.directory / "built"
        words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(sdist)]
        clean.pip(*words, variables=variables)
        (anew,) = built.glob("*.whl")
        # An old C library to link with gives other bytes.
        if "manylinux_2_28" not in wheel.name:
            assert files(anew) == files(wheel)
        clean.pip("install", "--quiet", str(anew))
        assert clean.packages() == {"gradring", "numpy"}
        clean.directory.joinpath("sum.py").write_text(PROGRAM)
        output = clean.run("gradring", "run", "-np", "2", "python", "sum.py")
    assert sorted(output.splitlines()) == ["[0] [2.0, 2.0] False", "[1] [2.0, 2.0] False"]
