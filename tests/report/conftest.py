"""A real browser for the tests of pages; without one they are skipped, unless HOOKLINE_BROWSER=required."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_waiting import PATIENCE

from hookline.report.report_page import write_report

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


def _missing(what: str) -> None:
    if os.environ.get("HOOKLINE_BROWSER") == "required":
        pytest.fail(f"HOOKLINE_BROWSER=required, and {what}.")
    pytest.skip(what)


@pytest.fixture(scope="module")  # not longer: while it runs, no other test of the process could use asyncio
def browser() -> Iterator[Any]:
    """Chromium, started once for a file of tests."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        _missing("there is no Chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield found
        found.close()


class Opened:
    """A page in the browser, with what it asked the network for and what it complained of."""

    def __init__(self, context: Any, place: Path | str) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page = context.new_page()
        self._url = place.resolve().as_uri() if isinstance(place, Path) else place
        context.route("**/*", self._route)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _route(self, route: Any) -> None:
        asked = route.request.url.split("#")[0]
        if asked == self._url or (self._url.startswith("http") and asked.startswith(f"{self._url}/")):
            route.continue_()
        else:
            self.requests.append(route.request.url)
            route.abort()

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def load(self, hash: str = "") -> Any:
        """Open it, and wait until everything is drawn."""
        self.page.goto(self._url + hash)
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=1000 * PATIENCE)
        return self.page


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open a page file, or a server's: ``visit(path, color_scheme="dark")``; in the end it must have been quiet."""
    contexts, visits = [], []

    def go(path: Path | str, *, width: int = 1280, height: int = 900, **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        visits.append(Opened(context, path))
        return visits[-1]

    yield go
    for context in contexts:
        context.close()
    assert [visit.complaints for visit in visits if visit.complaints] == []
    assert [visit.requests for visit in visits if visit.requests] == []


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages that several tests look at: ``small.html``, ``ill.html``, ``two.html``."""
    from helpers_report import facts, ill_run, small_run

    folder = tmp_path_factory.mktemp("pages")
    first = small_run(folder / "first")
    second = small_run(folder / "second", seed=2, facts_of=facts(strategy="stride", seed=8))
    write_report([first], folder / "small.html")
    write_report([first, second], folder / "two.html")
    write_report([ill_run(folder / "ill")], folder / "ill.html")
    return folder
