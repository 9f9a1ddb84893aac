"""`make licences`: the licence texts of the crates that the extension is built from, in one file.

Their licences want their texts to travel with the binary. The file lies beside LICENSE, so that
every wheel and source distribution has it; tests/packaging/test_licences.py compares it with the
sources of the crates.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXTS = ROOT / "THIRD-PARTY-LICENSES.txt"
TARGETS = (
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
)
"""What wheels are built for."""

_BEGINNINGS = ("license", "licence", "copying", "copyright", "notice", "unlicense")
_SOURCES = {".rs", ".c", ".h", ".py", ".toml", ".json"}
_HEAD = """\
The extension module of gradring is built from the Rust crates of this list, and from Rust's
standard library (MIT OR Apache-2.0). Behind the list stand the texts of their licences, each once.
"""


@dataclass(frozen=True, order=True)
class Crate:
    """One crate of someone else, and where its sources lie."""

    name: str
    version: str
    licence: str
    directory: Path

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def files(self) -> list[Path]:
        """Files with its licences, those of code that it has taken over among them."""
        return sorted(
            path
            for path in self.directory.rglob("*")
            if path.name.lower().startswith(_BEGINNINGS)
            and path.suffix not in _SOURCES
            and path.is_file()
        )


def crates() -> list[Crate]:
    """All crates of `cargo tree` that are not ours."""
    wanted = _tree()
    packages = json.loads(_cargo("metadata", "--format-version", "1"))["packages"]
    return sorted(
        Crate(p["name"], p["version"], p["license"], Path(p["manifest_path"]).parent)
        for p in packages
        if p["source"] is not None and (p["name"], p["version"]) in wanted
    )


def _tree() -> set[tuple[str, str]]:
    """Names and versions of what the extension is built from, without what only builds it."""
    targets = [option for target in TARGETS for option in ("--target", target)]
    lines = _cargo(
        *("tree", "--package", "gradring-python", "--edges", "normal", "--prefix", "none"),
        *("--format", "{p}", *targets),
    ).splitlines()
    words = [line.split() for line in lines if line]
    return {(name, version.removeprefix("v")) for name, version, *_ in words}


def _cargo(*arguments: str) -> str:
    done = subprocess.run(
        ["cargo", *arguments, "--locked"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def third_party_licences() -> str:
    """The whole file."""
    owners: dict[tuple[str, ...], list[str]] = defaultdict(list)
    texts: dict[tuple[str, ...], str] = {}
    listed = crates()
    for crate in listed:
        files = crate.files()
        if not files:
            raise SystemExit(f"{crate} has no file with its licence ({crate.licence})")
        for path in files:
            text = path.read_text()
            words = tuple(text.split())  # copies differ in how they are indented
            texts.setdefault(words, "\n".join(map(str.rstrip, text.strip("\n").splitlines())))
            owners[words].append(f"{crate}: {path.relative_to(crate.directory)}")
    names = "".join(f"* {crate} ({crate.licence})\n" for crate in listed)
    return "\n".join([_HEAD, names, *(_section(owners[words], texts[words]) for words in texts)])


def _section(owners: list[str], text: str) -> str:
    return f"{'-' * 100}\n" + "\n".join(owners) + f"\n\n{text}\n"


if __name__ == "__main__":
    TEXTS.write_text(third_party_licences())
