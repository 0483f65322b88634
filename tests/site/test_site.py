"""The built site: what its pages load, where its links lead, and how they look to a browser and to a screen reader.

``make docs`` builds it. ``FEDSEL_SITE`` names the folder of another build.
"""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from fedsel_flwr.selectors.registry import selector_class
from tests.browser import Browser, browser
from tests.pages import ROOT

__all__ = ["browser"]

pytestmark = pytest.mark.browser
WIDTHS = {"phone": 390, "tablet": 820, "desktop": 1440}
PAGES = {
    "home": "index.html",
    "how-to": "operating.html",
    "selector": "gallery/bsfl.html",
    "scenario reference": "scenario-reference.html",
    "search": "search.html?q=network_round_cv",
    "tutorial": "tutorial.html",
    "API": "api/fedsel_flwr/selectors/BSFL.html",
}
LOADED = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src", "object": "data"}
"""Element -> attribute with an address that a browser loads."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


class Page(HTMLParser):
    """The anchors and addresses of a page.

    Attributes:
        anchors: Ids and names of elements.
        links: Addresses to which the page links.
        loaded: Addresses that a browser loads with the page.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        wanted = LOADED.get(tag)
        if wanted in found and not (
            tag == "link" and found.get("rel") in ("next", "prev", "search", "index", "author")
        ):
            self.loaded.append(found[wanted])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file.read_text("utf-8")) for file in site.rglob("*.html")}


def test_no_link_inside_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 100
    dead = list[str]()
    for file, page in pages.items():
        for link in page.links:
            path, anchor = urldefrag(link)
            if urlsplit(link).scheme:
                continue
            target = (file.parent / unquote(urlsplit(path).path)).resolve() if path else file
            if not target.is_file():
                dead.append(f"{file.relative_to(site)}: {link}: no such file")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                dead.append(f"{file.relative_to(site)}: {link}: no such anchor")
    assert dead == []


def test_pages_load_files_of_the_site_only(site: Path, pages: dict[Path, Page]) -> None:
    found = [(file.name, one) for file, page in pages.items() for one in page.loaded]
    assert [(name, one) for name, one in found if urlsplit(one).scheme not in ("", "data") or one[:2] == "//"] == []
    styles = [(file, file.read_text("utf-8")) for file in site.rglob("*.css")]
    elsewhere = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])(?:https?:)?//""")
    assert [file.name for file, text in styles if elsewhere.search(text)] == []


def test_no_file_has_a_path_of_the_machine(site: Path) -> None:
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".js", ".css", ".ipynb", ".inv")]
    assert [file.name for file in files if str(ROOT).encode() in file.read_bytes()] == []


def test_every_page_of_the_repository_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    docs = ROOT / "docs"
    files = [*docs.glob("*.md"), *docs.glob("papers/*.md"), *docs.glob("results/*.md")]
    sources = {file.relative_to(docs).with_suffix(".html").as_posix() for file in files}
    menu = {urldefrag(link)[0] for link in pages[site / "index.html"].links}
    # The home page includes the table of docs/README.md.
    assert sources - {"index.html", "README.html"} <= menu


@pytest.mark.parametrize("name", ["selectors", "papers/README", "security", "results/selectors"])
def test_names_in_tables_of_selectors_lead_to_the_gallery(site: Path, name: str) -> None:
    text = (site / f"{name}.html").read_text("utf-8").partition('<article role="main"')[2].partition("</article>")[0]
    link = r'<a class="reference internal" href="{}gallery/([a-z-]+)\.html"><span class="doc">\1</span></a>'
    linked = set(re.findall(link.format("../" * name.count("/")), text))
    selectors = {one.stem for one in (site / "gallery").glob("*.html")} - {"index"}
    if name == "papers/README":  # a selector of nobody's paper is in no table of papers
        selectors = {one for one in selectors if selector_class(one).citations}
    if name == "results/selectors":  # the rows of a date: a new selector has none yet
        selectors = {one for one in selectors if f">{one}<" in text}
    assert len(selectors) > 15
    assert selectors <= linked


def test_the_home_page_leads_elsewhere_and_the_navigation_names_a_page_once(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    text = home.partition('<article role="main"')[2].partition("</article>")[0]
    assert '<a class="reference internal" href="operating.html#resume-after-a-crash">' in text
    assert re.findall(r'<a class="reference internal" href="(?:#|index\.html)">', text) == []
    menu = re.findall(r'<li class="toctree-l1[^"]*"><a class="reference internal" href="[^"]*">([^<]*)</a>', home)
    assert len(menu) > 20
    assert sorted(menu) == sorted(set(menu))
    assert {"Report a vulnerability", "Choose a selector"} <= set(menu)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_quiet_and_accessible(browser: Browser, address: str, name: str, width: str, dark: bool) -> None:
    with browser.visit(address + PAGES[name], address, width=WIDTHS[width], dark=dark) as opened:
        if name == "search":
            opened.page.wait_for_selector("#search-results li .context")
        assert [one for one in opened.violations() if one[1] in ("serious", "critical")] == []
        assert opened.faults == []
        # A wide table or program scrolls on its own.
        assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


QUESTIONS = {
    "network_round_cv": "scenario-reference.html#system.network_round_cv",
    "system.network_round_cv": "scenario-reference.html#system.network_round_cv",
    "secure aggregation": "security.html",
    "differential privacy": "security.html",
    "secagg": "security.html",
    "cap fedcs": "gallery/fedcs.html",
    "limit cohort": "gallery/fedcs.html",
    "maximum clients divfl": "gallery/divfl.html",
    "resume crash": "operating.html",
    "Oort": "gallery/oort.html",
    "BSFL": "api/fedsel_flwr/selectors/BSFL.html",
}
"""Words that a reader searches -> a page among the first five."""


@pytest.mark.parametrize("opened_as", ["served", "file"])
@pytest.mark.parametrize("words", QUESTIONS)
def test_search_finds_the_answer(browser: Browser, site: Path, address: str, words: str, opened_as: str) -> None:
    base = address if opened_as == "served" else f"{site.absolute().as_uri()}/"
    with browser.visit(f"{base}search.html?q={words.replace(' ', '+')}", base) as opened:
        opened.page.wait_for_function("document.querySelector('#search-results p')?.textContent.includes('found')")
        links = opened.page.locator("#search-results li > a").evaluate_all("all => all.map((one) => one.href)")
        first = [
            link.removeprefix(base).split("?")[0] + ("#" + link.split("#")[1] if "#" in link else "")
            for link in links[:5]
        ]
        assert any(one.startswith(QUESTIONS[words]) for one in first), first
        assert opened.faults == []
