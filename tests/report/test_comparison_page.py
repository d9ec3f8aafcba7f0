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
    """Whole from disk, also on a phone: the verdict, a row for each layer, shaded by its error, the worst first."""
    path = compare(_run(), _run(1)).write_html(tmp_path / "compared.html")
    page = visit(path).load()
    assert "Blamed: h.1.mlp." in page.inner_text("#verdict")
    rows = page.eval_on_selector_all(
        "table:first-of-type tbody tr", "all => all.map(row => [...row.children].map(one => one.textContent))"
    )
    layers = {row[0]: row[1:] for row in rows[:6]}
    assert [*layers] == ["embed", "h.0", "h.1", "h.2", "h.3", "</script>head"]
    assert layers["h.0"] == ["", "=", "="]
    assert layers["h.1"] == ["", "=", "6.0"]
    assert layers["h.3"][2] == "nan"
    assert "background-color" in page.locator("table tbody tr").nth(2).locator("td").nth(3).get_attribute("style")
    worst = page.locator("section").last.locator("tbody tr").first.locator("td").first
    assert worst.inner_text() == "h.3.mlp"
    assert visit(path, width=390).load().evaluate("document.documentElement.scrollWidth") <= 390
