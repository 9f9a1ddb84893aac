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
from mkdocs.structure.toc import AnchorLink

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
#: In a docstring, the path of a page.
PAGE = re.compile(r"\bdocs/([\w-]+\.md)")
#: The place in docs/api.md of the list of all names.
NAMES = "<!-- all names -->"
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


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links of the pages that docstrings name."""

    def linked(path: re.Match[str]) -> str:
        target = files.get_file_from_path(path[1])
        if target is None:
            raise PluginError(
                f"a docstring on {page.file.src_uri} names {path[0]}, which is missing"
            )
        words = path[1].removesuffix(".md").replace("-", " ")
        return f'<a href="{target.url_relative_to(page.file)}">{words}</a>'

    return PAGE.sub(linked, html) if page.file.src_uri.startswith("api/") else html


def on_env(env: object, *, config: MkDocsConfig, files: Files) -> None:
    """Puts the list of all names into docs/api.md, from the headings of the pages after it."""
    file = files.get_file_from_path("api.md")
    assert file is not None and file.page is not None and file.page.content is not None
    modules = []
    page = file.page.next_page
    while page is not None and page.file.src_uri.startswith("api/"):
        url = page.file.url_relative_to(file)
        modules += [name_list(url, module) for title in page.toc for module in title.children]
        page = page.next_page
    file.page.content = file.page.content.replace(NAMES, "\n".join(modules))


def name_list(url: str, module: AnchorLink) -> str:
    """Links to a module and to its names, on the page at an address."""
    names = ", ".join(
        f'<a href="{url}#{name.id}"><code>{name.id.removeprefix(f"{module.id}.")}</code></a>'
        for name in module.children
    )
    title = f'<a href="{url}#{module.id}"><code>{module.id}</code></a>'
    return f"<p><strong>{title}</strong><br>{names}</p>"
