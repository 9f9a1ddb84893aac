"""The built wheel: what it holds, where it may be installed, what it does there by itself."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from environments import PYTHONS, Environment, environment_of
from packaging.requirements import Requirement

from index_page import BYTES, FILES
from support.documents import ROOT


@pytest.fixture(scope="module")
def plain(wheel: Path) -> Iterator[Environment]:
    with environment_of() as environment:
        environment.pip("install", "--quiet", str(wheel))
        yield environment


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"gradring/_native.abi3.so", "gradring/_native.pyi", "gradring/py.typed"} <= set(names)
    assert {re.split(r"[/-]", name)[0] for name in names} == {"gradring", "gradring_start"}
    assert [name for name in names if ".data/" in name] == [
        next(name for name in names if name.endswith(".data/purelib/gradring_start.pth"))
    ]
    assert not [name for name in names if "__pycache__" in name]


def test_it_is_small_and_names_its_crates_without_a_date_of_its_own(wheel: Path) -> None:
    assert wheel.stat().st_size < 5 << 20
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if "/sboms/" in name)
        parts = json.loads(archive.read(name))
        dates = {entry.date_time for entry in archive.infolist()}
    assert {"pyo3", "rustls", "gradring-core"} <= {part["name"] for part in parts["components"]}
    # By `SOURCE_DATE_EPOCH`, so that two builds of a commit are equal.
    assert "serialNumber" not in parts
    assert len(dates) == 1


@pytest.mark.parametrize("name", ["LICENSE", "THIRD-PARTY-LICENSES.txt"])
def test_it_holds_the_licences_of_all_that_it_contains(wheel: Path, name: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/licenses/{name}"))
        assert archive.read(path).decode() == (ROOT / name).read_text()


def test_its_tag_asks_for_no_older_c_library_than_it_needs(wheel: Path) -> None:
    """One wheel for every Python from 3.10, for Linux with the C library that the tag names."""
    tag = re.search(r"-cp310-abi3-manylinux_(\d+)_(\d+)_(x86_64|aarch64)\b", wheel.name)
    assert tag is not None, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("gradring/_native.abi3.so")
    needed = {(int(a), int(b)) for a, b in re.findall(rb"\bGLIBC_(\d+)\.(\d+)", library)}
    assert needed and max(needed) <= (int(tag[1]), int(tag[2]))


def test_it_needs_numpy_alone(plain: Environment, metadata: Message) -> None:
    assert plain.packages() == {"gradring", "numpy"}
    required = metadata.get_all("Requires-Dist", [])
    assert [line for line in required if "extra ==" not in line] == ["numpy>=1.26"]


def test_its_metadata_is_whole(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Summary"] and metadata["Description-Content-Type"] and metadata["Author"]
    classifiers = metadata.get_all("Classifier", [])
    for version in PYTHONS:
        assert f"Programming Language :: Python :: {version}" in classifiers
    links = {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])}
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= links
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"tensorflow", "tensorflow-cpu", "ray", "demo", "bench", "docs", "dev"} <= extras


def test_the_index_takes_it(wheel: Path) -> None:
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)


def test_the_links_of_the_page_that_the_index_shows_lead_somewhere(metadata: Message) -> None:
    page = metadata.get_payload()
    assert isinstance(page, str)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    ours = [
        link.removeprefix(base.format(version=metadata["Version"])).partition("#")[0]
        for link in links
        for base in (FILES, BYTES)
        if link.startswith(base.partition("{")[0])
    ]
    assert [path for path in ours if path.endswith(".png")]
    assert not [path for path in ours if not (ROOT / path).is_file()]


@pytest.mark.parametrize(
    ("extra", "machine", "package"),
    [
        ("tensorflow", "x86_64", "tensorflow"),
        ("tensorflow", "aarch64", "tensorflow"),
        ("tensorflow-cpu", "x86_64", "tensorflow-cpu"),
        ("tensorflow-cpu", "aarch64", "tensorflow"),  # PyPI has no other there
    ],
)
def test_an_extra_asks_for_one_tensorflow(
    metadata: Message, extra: str, machine: str, package: str
) -> None:
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    place = {"extra": extra, "platform_machine": machine}
    asked = [r for r in required if r.marker is not None and r.marker.evaluate(place)]
    assert [(r.name, r.specifier) for r in asked] == [(package, asked[0].specifier)]
    assert "2.16.0" in asked[0].specifier and "2.15.1" not in asked[0].specifier


def test_the_import_is_quick_and_leaves_tensorflow_alone(plain: Environment) -> None:
    program = "import gradring, sys; print('tensorflow' in sys.modules, gradring.build_info())"
    output = plain.run("python", "-c", program)
    assert output.startswith("False")
    assert "'debug': False" in output


def test_what_starts_with_every_interpreter_does_nothing_unless_it_is_asked(
    plain: Environment,
) -> None:
    modules = "import sys; print(sorted(m for m in sys.modules if m.startswith('gradring')))"
    assert plain.run("python", "-c", modules) == "[]\n"
    asked = plain.run("env", "GRADRING_AS_HOROVOD=1", "python", "-c", modules)
    assert asked == "['gradring_start']\n"
    program = plain.directory / "program.py"
    program.write_text("import horovod; print(horovod.__version__, horovod.__name__)\n")
    said = "0.28.1 gradring.horovod\n"
    assert plain.run("python", "-m", "gradring.horovod", "program.py") == said
    assert plain.run("gradring", "run", "--as-horovod", "-np", "1", "program.py") == f"[0] {said}"


def test_the_demo_says_what_to_install(plain: Environment) -> None:
    assert 'pip install "tensorflow' in plain.run("gradring", "demo", exit_code=2)


def test_a_part_whose_package_is_missing_says_what_to_install(plain: Environment) -> None:
    for part, package in (
        ("tensorflow.elastic", "tensorflow"),
        ("horovod.tensorflow.keras", "tensorflow"),
        ("ray", "ray"),
    ):
        program = (
            f"try:\n import gradring.{part}\nexcept ModuleNotFoundError as e: print(e.name, e)"
        )
        said = plain.run("python", "-c", program)
        assert said.startswith(f"{package} No module named '{package}': gradring.")
        assert f'type: pip install "{package}' in said


@pytest.mark.slow
@pytest.mark.timeout(1200)  # installs TensorFlow
def test_the_demo_runs_beside_tensorflow_cpu_with_what_it_asks_for(wheel: Path) -> None:
    with environment_of() as demo:
        demo.pip("install", "--quiet", f"gradring[tensorflow-cpu] @ file://{wheel}")
        _, _, command = demo.run("gradring", "demo", exit_code=2).partition("with: pip ")
        demo.pip(*shlex.split(command))
        assert "tensorflow" not in demo.packages()
        shows_its_results(demo)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # installs TensorFlow with CUDA: half a gigabyte
def test_the_demos_extra_leaves_an_installed_tensorflow_alone(wheel: Path) -> None:
    with environment_of() as demo:
        demo.pip("install", "--quiet", "tensorflow==2.21.0")
        demo.pip("install", "--quiet", f"gradring[demo] @ file://{wheel}")
        # pip would unpack it over the files of the other.
        assert "tensorflow-cpu" not in demo.packages()
        shows_its_results(demo)


def shows_its_results(demo: Environment) -> None:
    output = demo.run("gradring", "demo", "--report", "report")
    assert "bit-identical" in output
    assert list(demo.directory.glob("report/*.png"))
