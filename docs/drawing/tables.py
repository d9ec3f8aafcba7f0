"""The tables of metrics on the pages of docs/analyses, written from the hooks themselves.

Takes ``describe_metrics`` of every built-in hook, hands back Markdown, and puts it between the marks on its
page; `tests/analyses/test_analyses_pages.py` fails where a page says something else.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any, Final

import hookline.analyses
from hookline import MetricInfo
from hookline.analyses import BUILT_IN

PAGES: Final = Path(__file__).parents[1] / "analyses"
_MARKED: Final = re.compile(r"(<!-- metrics of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

FOLDED: Final = {
    "stats": [
        MetricInfo("nonfinite", "tensors with NaN or Inf in them, everywhere", sign_info="0 is healthy"),
        MetricInfo("looked_at", "newest step that was looked at; the others are of it and those before"),
        MetricInfo("max_{kind}", "largest magnitude in all layers", "max |x|"),
        MetricInfo("{layer}/{kind}/{stat}", "of one layer, or parameter, since the last report"),
        MetricInfo("{kind}/{stat}", "of the model as a whole"),
    ]
}
"""Where four kinds times six statistics would make a table of fifty rows: the same with words for them."""


def hook(name: str) -> Any:
    """A hook as it is without options."""
    return hook_class(name)()


def hook_class(name: str) -> Any:
    """The class of a built-in hook."""
    return getattr(hookline.analyses, BUILT_IN[name].partition(":")[2])


def metrics(name: str) -> list[MetricInfo]:
    """The rows of its table."""
    found: list[MetricInfo] = FOLDED[name] if name in FOLDED else hook(name).describe_metrics()
    return found


def metric_names(name: str) -> set[str]:
    """What the rows stand for, each by itself."""
    names = [info.name for info in metrics(name)]
    if name not in FOLDED:
        return set(names)
    made = hook(name)
    return {
        each.replace("{kind}", kind).replace("{stat}", stat) for each, kind, stat in product(names, made.on, made.stats)
    }


def table(name: str) -> str:
    """Return the table of a hook's metrics; those that there are of each part too are named below it."""
    head = ("metric", "what it is", "formula", "how to read it")
    found = metrics(name)
    whole = {info.name for info in found}
    by_part = [info.name for info in found if info.name.rpartition("/{")[0] in whole]
    rows = [(f"`{m.name}`", m.description, m.formula, m.sign_info) for m in found if m.name not in by_part]
    lines = [head, ("---",) * len(head), *rows]
    text = "".join(f"| {' | '.join(_safe(cell) for cell in line)} |\n" for line in lines)
    return text + (f"\nOf each part too: {', '.join(f'`{each}`' for each in by_part)}.\n" if by_part else "")


def _safe(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*") if "`" not in cell else cell.replace("|", "\\|")


def with_tables(text: str) -> str:
    """Return a page as it should be."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


def write() -> None:
    """Put the tables of all hooks on their pages."""
    for page in PAGES.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
