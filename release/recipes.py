"""Recipes for conda-forge, EasyBuild and Spack, from the templates in release/recipes/.

``make recipes`` calls it with a source distribution and a folder. Digests and crates are those of
the distribution, so that the recipes of a version can be written when it is built.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
from pathlib import Path

TEMPLATES = Path(__file__).parent / "recipes"
#: A crate from the registry in Cargo.lock: name, version, digest.
CRATE = re.compile(
    r'^name = "(.+)"\nversion = "(.+)"\nsource = "registry.+"\nchecksum = "(.+)"$', re.MULTILINE
)


def recipes(sdist: Path) -> dict[str, str]:
    """The recipes by the names of their files."""
    version = sdist.name.removeprefix("gradring-").removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        lock = archive.extractfile(f"gradring-{version}/Cargo.lock")
        assert lock is not None
        crates = CRATE.findall(lock.read().decode())
    values = {
        "version": version,
        "sha256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
        "crates": "\n".join(f"    ('{name}', '{number}')," for name, number, _ in crates),
        "checksums": "\n".join(
            f"    {{'{name}-{number}.tar.gz': '{digest}'}}," for name, number, digest in crates
        ),
    }

    def filled(template: str) -> str:
        text = TEMPLATES.joinpath(template).read_text()
        return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)

    return {
        "recipe.yaml": filled("conda-forge.yaml").partition("\n")[2],
        f"gradring-{version}-gfbf-2025b.eb": filled("easybuild.eb"),
        "py_gradring/package.py": filled("spack.py.in").partition("\n")[2],
    }


def main(sdist: str, folder: str) -> None:
    """Writes them into the folder."""
    for name, text in recipes(Path(sdist)).items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
