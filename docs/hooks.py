"""Hooks of `mkdocs build`: documents of the top level join its pages, and links are mapped.

README.md and its neighbours are read on their own as well, and pages link to files of the
repository, so links are written as paths between files. In the site they must lead to pages, or to
the file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Documents of the top level, and the pages that they become.
DOCUMENTS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the documents of the top level."""
    for document, page in DOCUMENTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / document)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Maps the links of a page."""
    document = {name: path for path, name in DOCUMENTS.items()}.get(page.file.src_uri)
    directory = "" if document else posixpath.dirname(f"docs/{page.file.src_uri}")

    def reached(page_of_the_site: str) -> str:
        return posixpath.relpath(page_of_the_site, posixpath.dirname(page.file.src_uri) or ".")

    def mapped(link: re.Match[str]) -> str:
        target, _, anchor = link[2].partition("#")
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(directory, target))
        if path in DOCUMENTS:
            target = reached(DOCUMENTS[path])
        elif path.startswith("docs/"):
            target = reached(path.removeprefix("docs/"))
        elif (ROOT / path).exists():
            target = f"{config.extra['repository']}/blob/main/{path}"
        else:
            raise PluginError(
                f"{document or page.file.src_uri} links to {target}, which is missing"
            )
        return f"{link[1]}{target}{'#' + anchor if anchor else ''})"

    return LINK.sub(mapped, markdown)
