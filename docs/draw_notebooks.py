"""Take the picture of docs/notebooks.md: what three cells of the notebooks show, light and dark; needs Chromium.

python docs/draw_notebooks.py
"""

from __future__ import annotations

import json
import shutil
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "notebook.png"
CELLS = [("watch", "hl.find(model)"), ("watch", "watch"), ("capture_and_patch", 'cache["blocks.1"]')]
"""Notebooks, and the last lines of their cells."""
STYLE = """
body { margin: 0; display: flex; align-items: stretch; font: 13px/1.45 'DejaVu Sans', sans-serif }
section { width: 50%; padding: 14px 18px; box-sizing: border-box }
pre { padding: 5px 8px; margin: 10px 0 6px; font-size: 12px; border: 1px solid #8886; background: #8882 }
table { border-collapse: collapse; font-size: 12px } td, th { padding: 2px 8px }
.light { background: #fff; color: #222 } .dark { background: #111; color: #e4e4e4 }
"""


def output_of(notebook: str, last_line: str) -> str:
    """Return the HTML below the cell that ends with ``last_line``."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    cell = next(cell for cell in cells if cell["cell_type"] == "code" and cell["source"][-1] == last_line)
    return "".join(cell["outputs"][0]["data"]["text/html"])


def main() -> None:
    """Draw the cells twice, side by side."""
    from playwright.sync_api import sync_playwright

    shown = "".join(f"<pre>{escape(line)}</pre>{output_of(notebook, line)}" for notebook, line in CELLS)
    page = f"<!doctype html><style>{STYLE}</style>" + "".join(
        f'<section class="{theme}">{shown}</section>' for theme in ("light", "dark")
    )
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        view = browser.new_context(viewport={"width": 1360, "height": 400}, java_script_enabled=False).new_page()
        view.set_content(page)
        view.screenshot(path=PICTURE, full_page=True)
        browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
