"""What tests of a page do in the browser: wait, read plots, move sliders."""

from __future__ import annotations

import time
from typing import Any

from helpers_waiting import PATIENCE

CARD = "article[data-metric='{}'] .plot"


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until it holds. The page's own policy forbids what playwright's wait_for_function does."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(20)


def drawn(page: Any, selector: str) -> list[dict[str, Any]]:
    """The traces of a plot, once it is drawn."""
    page.locator(selector).scroll_into_view_if_needed()
    until(page, "s => document.querySelector(s)?.data?.length > 0", selector)
    script = """s => document.querySelector(s).data.map(t => ({ type: t.type, name: t.name, meta: t.meta ?? null,
        x: [...(t.x ?? [])], y: [...(t.y ?? [])], z: t.z ? t.z.map(r => [...r].map(v => v ?? 'gap')) : null,
        told: t.customdata ? t.customdata.map(r => [...r]) : null }))"""
    traces: list[dict[str, Any]] = page.evaluate(script, selector)
    return traces


def cards(page: Any) -> list[str]:
    names: list[str] = page.eval_on_selector_all("article", "all => all.map(one => one.dataset.metric)")
    return names


def page_width(page: Any) -> int:
    width: int = page.evaluate("document.documentElement.scrollWidth")
    return width


def slide(page: Any, selector: str, value: float) -> None:
    page.eval_on_selector(selector, "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value)
