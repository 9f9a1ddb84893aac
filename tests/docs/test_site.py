"""The site that `make docs` builds, in Chromium, as wide as a window and as a phone."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_names import MODULES, documented, module_of
from playwright.sync_api import Page, sync_playwright

from support.documents import ROOT

WIDTHS = {1300: 1000, 420: 900}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
#: The directory that `make pictures` wants.
PICTURES = os.environ.get("SITE_PICTURES")
#: Parts of the text that a reader sees only by scrolling the whole page sideways, or never.
CUT = """() => {
    const scrolls = (one) => one && (
        ["auto", "scroll"].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
    return [...document.querySelectorAll("article *")]
        .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one))
        .map((one) => one.outerHTML.slice(0, 100));
}"""
#: The entries that a reader sees in the sidebar: addresses of pages, and titles of sections.
LISTED = """() => [...document.querySelectorAll(".md-sidebar--primary .md-nav__link")]
    .filter((link) => {
        const place = link.getBoundingClientRect();
        return link.checkVisibility({visibilityProperty: true, opacityProperty: true})
            && place.width > 0 && place.right > 0 && place.left < innerWidth;
    })
    .map((link) => link.href ? new URL(link.href).pathname : link.innerText.trim())"""


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return directory


@pytest.fixture(scope="module")
def tabs(site: Path) -> Iterator[list[Page]]:
    """Tabs of Chromium, one of each width, whose addresses are those of the site."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing. Install it with: apt-get install chromium")
    handler = functools.partial(Server, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        base = f"http://127.0.0.1:{server.server_port}"
        yield [
            browser.new_page(base_url=base, viewport={"width": width, "height": height})
            for width, height in WIDTHS.items()
        ]
        browser.close()
        server.shutdown()


def addresses(entry: Any) -> list[str]:
    """Addresses of pages in a part of the navigation, or in all of it."""
    if isinstance(entry, str):
        stem = entry.removesuffix(".md").removesuffix("index")
        return [f"/{stem}/" if stem else "/"]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [address for part in parts for address in addresses(part)]


NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
INTERNALS = addresses([entry for entry in NAVIGATION if "Internals" in entry])
USERS = [address for address in addresses(NAVIGATION) if address not in INTERNALS]


@pytest.mark.parametrize("address", USERS + INTERNALS)
def test_a_page_fits_the_window(address: str, tabs: list[Page]) -> None:
    for tab, width in zip(tabs, WIDTHS, strict=True):
        tab.goto(address)
        if PICTURES is not None:
            name = address.strip("/").replace("/", "-") or "index"
            tab.screenshot(path=Path(PICTURES) / f"{name}-{width}.png")
        assert not tab.evaluate(CUT)
        assert tab.evaluate("document.documentElement.scrollWidth") == width


# On all pages of a tab the sidebar has the same entries.
@pytest.mark.parametrize("address", [addresses(entry)[0] for entry in NAVIGATION])
def test_the_sidebar_of_a_users_page_lists_no_internals(address: str, tabs: list[Page]) -> None:
    (own,) = (each for entry in NAVIGATION if address in (each := addresses(entry)))
    window, phone = tabs
    window.goto(address)
    assert {*window.evaluate(LISTED)} >= {*own}
    phone.goto(address)
    phone.locator(".md-header label[for=__drawer]").click()
    phone.wait_for_function(f"({LISTED})().length > 0")
    for tab in tabs:
        assert own == INTERNALS or not {*tab.evaluate(LISTED)} & {*INTERNALS}


def test_a_page_that_does_not_fit_is_found_out(tabs: list[Page]) -> None:
    for tab in tabs:
        tab.goto("/versions/")
        wide = "<div style='width: 2000px'>x</div>"
        tab.evaluate(f'document.querySelector("article").insertAdjacentHTML("beforeend", "{wide}")')
        assert len(tab.evaluate(CUT)) == 1


def test_every_public_name_has_an_anchor_and_is_in_the_list(site: Path) -> None:
    index = (site / "api" / "index.html").read_text()
    for path in documented():
        module = module_of(path)
        page = MODULES[module]
        assert f'id="{path}"' in (site / "api" / page / "index.html").read_text(), path
        if path.rpartition(".")[0] in (module, ""):
            assert f'href="{page}/#{path}"' in index, path


def test_a_page_of_the_api_has_all_of_a_docstring(site: Path) -> None:
    page, tensorflow = (
        (site / "api" / name / "index.html").read_text() for name in ("groups", "tensorflow")
    )
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page))
    assert "Seconds without any movement" in text
    assert "RendezvousError \N{EN DASH} The group did not form in time" in text
    assert "wire_dtype: WireDtype | None = None" in text
    assert "Types of the result of Communicator.stats; observability defines its times." in text
    # The arguments of a class come before its examples.
    assert text.index("rank (int) \N{EN DASH} This process's index") < text.index(
        "as all examples have it"
    )
    assert "16 * 1024 * 1024" in re.sub(r"<[^>]*>", "", tensorflow)
    assert "====" not in page + tensorflow
