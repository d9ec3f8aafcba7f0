"""Run the walks of docs/debugging.md, fill in what they print, and take pictures of their pages.

python docs/draw_debugging.py            pictures only; needs Chromium and playwright
python docs/draw_debugging.py --text     also write what the blocks print into the page
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("debugging.md")
PICTURES = PAGE.with_name("pictures")
WALKS = ("port", "residual")
"""The comparisons of the page that have a picture."""
_PAIR = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the blocks, write the text if asked to, draw the pictures."""
    text, namespace = run_blocks(PAGE.read_text(encoding="utf-8"))
    if "--text" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        pages = {name: namespace[name].write_html(Path(folder) / f"{name}.html") for name in WALKS}
        draw(pages)


def run_blocks(text: str) -> tuple[str, dict[str, Any]]:
    """Return the page with what its blocks print, and what they have defined."""
    namespace: dict[str, Any] = {"__name__": "__page__"}

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[1], str(PAGE), "exec"), namespace)
        shown = f"\n```text\n{printed.getvalue()}```\n" if match[2] is not None else ""
        return f"```python\n{match[1]}```\n{shown}"

    return _PAIR.sub(run, text), namespace


def draw(pages: dict[str, Path]) -> None:
    """Take a picture of the top of each page."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser_path = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for name, path in pages.items():
            view = browser.new_page(viewport={"width": 980, "height": 780})
            view.goto(path.resolve().as_uri())
            view.wait_for_selector("html[data-ready]", state="attached")
            height = view.evaluate("document.querySelector('#map-box').getBoundingClientRect().bottom + 6")
            clip = {"x": 0, "y": 0, "width": 980, "height": height}
            view.screenshot(path=PICTURES / f"debugging_{name}.png", full_page=True, clip=clip)
            print(PICTURES / f"debugging_{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
