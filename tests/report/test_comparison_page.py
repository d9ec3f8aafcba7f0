"""What a reader of the page of a comparison sees, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hookline.debug.compare.compare import compare


def _run(seed: int = 0) -> dict[str, Any]:
    source = torch.Generator().manual_seed(0)
    sites = ["embed", *(f"h.{layer}.{part}" for layer in range(4) for part in ("ln", "mlp")), "</script>head"]
    tensors = {site: torch.randn(3, 4, generator=source) for site in sites}
    if seed:
        for site in sites[4:]:
            tensors[site] = tensors[site] + 1
        tensors["h.3.mlp"][0, 0] = torch.nan
    return tensors


def test_the_page_of_a_comparison_shows_the_map_and_the_table(visit: Callable[..., Any], tmp_path: Path) -> None:
    """Whole from disk, in light and dark: a cell for each site, the first divergence marked, a search that narrows."""
    path = compare(_run(), _run(1)).write_html(tmp_path / "compared.html")
    page = visit(path).load()
    assert "Blamed: h.1.mlp." in page.inner_text("#verdict")
    rows = page.eval_on_selector_all("#map tbody th", "all => all.map(one => one.textContent)")
    assert rows == ["embed", "h.0", "h.1", "h.2", "h.3", "</script>head"]
    levels = page.eval_on_selector_all("#map tbody td:not(.none)", "all => all.map(one => one.className)")
    assert levels[:4] == ["l0"] * 4  # embed, h.0.ln, h.0.mlp, h.1.ln
    assert levels[4] == "l7 first"
    assert "l8" in levels
    page.hover("#map td.first")
    assert page.inner_text("#told").startswith("h.1.mlp · output · step 0, call 0 · wrong")
    assert page.inner_text("#values tbody tr:first-child td:first-child") == "h.3.mlp"
    page.fill("#search", "h.2")
    assert page.locator("#values tbody tr").count() == 2
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = visit(path, color_scheme="dark", width=390).load()
    assert dark.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    assert dark.evaluate("document.documentElement.scrollWidth") <= 390
