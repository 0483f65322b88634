"""A headless Chromium for pages: opens a file, and notes everything that a page must not do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page of Playwright's; faults are messages on the console, errors, and requests for what is not its own."""

    page: Any
    faults: list[str] = field(default_factory=list)

    def rows(self, chart: str) -> list[dict[str, Any]]:
        found = self.page.evaluate("name => window.fedsel.views[name]?.data('rows') ?? []", chart)
        return [dict(row) for row in found]

    def choose(self, menu: str, value: str) -> None:
        self.page.evaluate("delete document.documentElement.dataset.drawn")
        self.page.select_option(f"select[name={menu}]", value)
        self.wait()

    def open_all(self) -> None:
        """Open everything that a reader can open."""
        self.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        self.page.wait_for_timeout(100)  # the tables are filled by an event

    def violations(self) -> list[Any]:
        """What axe finds: the rule, the weight, and the first element."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
        found = axe.Axe().run(self.page).response["violations"]
        return [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in found]

    def wait(self) -> None:
        self.page.wait_for_function("document.documentElement.dataset.drawn !== undefined")


class Browser:
    """Chromium."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextmanager
    def open(self, path: Path, after: str = "", **window: Any) -> Iterator[Opened]:
        """Open a file, in a window as of :meth:`visit`; ``after`` follows its path, such as "#seed=2"."""
        with self.visit(path.absolute().as_uri() + after, "file:", **window) as opened:
            opened.wait()
            yield opened

    @contextmanager
    def visit(
        self, address: str, own: str, *, width: int = 1200, height: int = 900, dark: bool = False
    ) -> Iterator[Opened]:
        """Open an address in a window of so many pixels; the page may load what begins with ``own``."""

        def foreign(url: str) -> list[str]:
            return [] if url.startswith((own, "blob:", "data:")) else [f"request: {url}"]

        scheme = "dark" if dark else "light"
        context = self._chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        try:
            opened = Opened(context.new_page())
            page, faults = opened.page, opened.faults
            page.set_default_timeout(20_000)
            page.on("console", lambda message: faults.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: faults.append(f"error: {error}"))
            page.on("request", lambda request: faults.extend(foreign(request.url)))
            page.goto(address)
            yield opened
        finally:
            context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of a file: Playwright holds the thread's event loop while it runs."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    command = next(filter(None, map(shutil.which, NAMES)), None)
    if command is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=command, args=["--no-sandbox"])
        yield Browser(chromium)
        chromium.close()
