"""Makes the README's links absolute in built distributions, for the page that PyPI shows of them.

In the repository they are paths between files, which lead nowhere from PyPI. There they lead to
the files of the release's tag, and pictures to their bytes.

    python release/index_page.py dist/gradring-1.2.3*
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path

FILES = "https://github.com/gradring/gradring/blob/v{version}/"
BYTES = "https://raw.githubusercontent.com/gradring/gradring/v{version}/"

_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_VERSION = re.compile(r"^Version: (.+)$", re.MULTILINE)


def absolute(metadata: str) -> str:
    """Metadata whose description has no link between files."""
    version = _VERSION.search(metadata)
    assert version is not None

    def mapped(link: re.Match[str]) -> str:
        if "://" in link[0] or link[0].startswith("#"):
            return link[0]
        base = BYTES if link[0].endswith((".png", ".svg")) else FILES
        return base.format(version=version[1]) + link[0]

    return _LINK.sub(mapped, metadata)


def in_wheel(path: Path) -> None:
    """Rewrites METADATA of a wheel, and its line in RECORD."""
    with zipfile.ZipFile(path) as wheel:
        entries = [(entry, wheel.read(entry)) for entry in wheel.infolist()]
    (name,) = (e.filename for e, _ in entries if e.filename.endswith(".dist-info/METADATA"))
    record = name.replace("METADATA", "RECORD")
    contents = {entry.filename: content for entry, content in entries}
    contents[name] = absolute(contents[name].decode()).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
    line = f"{name},sha256={digest},{len(contents[name])}"
    contents[record] = re.sub(
        rf"^{re.escape(name)},.*$", line, contents[record].decode(), flags=re.MULTILINE
    ).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for entry, _ in entries:
            wheel.writestr(entry, contents[entry.filename])


def in_sdist(path: Path) -> None:
    """Rewrites PKG-INFO of a source distribution."""
    with tarfile.open(path) as sdist:
        members = [(m, sdist.extractfile(m)) for m in sdist.getmembers()]
        contents = [(m, content.read() if content else b"") for m, content in members]
    # A time in gzip's header would make two builds of a commit differ.
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(mode="w", fileobj=packed) as sdist,
    ):
        for member, content in contents:
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO"):
                content = absolute(content.decode()).encode()
                member.size = len(content)
            sdist.addfile(member, io.BytesIO(content))


def main(*distributions: str) -> None:
    """Rewrites what it is given: again, this changes nothing."""
    for path in map(Path, distributions):
        (in_wheel if path.suffix == ".whl" else in_sdist)(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
