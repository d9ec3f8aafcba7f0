"""The lists of metrics on the pages of docs/analyses, written from the hooks themselves.

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
    """Return the list of a hook's metrics with their formulas; those of each layer or parameter are named below it."""
    found = metrics(name)
    whole = {info.name for info in found}
    by_part = [info.name for info in found if _is_of_a_part(info.name, whole)]
    rows = _folded_by_number([info for info in found if info.name not in by_part])
    lines = [f"- {names}: {about}{f' ({formula})' if formula else ''}\n" for names, about, formula in rows]
    also = f"\nAlso per layer or parameter: {', '.join(f'`{each}`' for each in by_part)}.\n" if by_part else ""
    return "".join(lines) + also


def _is_of_a_part(name: str, whole: set[str]) -> bool:
    """Say whether the name without one of its placeholders (``{layer}/load_max``) is a metric too."""
    words = name.split("/")
    others = ["/".join(words[:i] + words[i + 1 :]) for i, word in enumerate(words) if word.startswith("{")]
    return any(other in whole for other in others)


def _folded_by_number(found: list[MetricInfo]) -> list[tuple[str, str, str]]:
    """Return names, meaning and formula of each; metrics that differ by a number share one, with k for it."""
    rows: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for info in found:
        about, formula = _safe(info.description), _safe(info.formula)
        number = re.search(r"\d+", info.name)
        folded = (_with_k(about, number[0]), _with_k(formula, number[0])) if number else (about, formula)
        rows.setdefault(folded, []).append((f"`{info.name}`", about, formula))
    return [
        same[0] if len(same) == 1 else (", ".join(row[0] for row in same), *folded) for folded, same in rows.items()
    ]


def _with_k(text: str, number: str) -> str:
    return re.sub(rf"(?<!\d){number}(?![\d:])", "k", text)


def _safe(text: str) -> str:
    return text.replace("*", "\\*")


def with_tables(text: str) -> str:
    """Return a page as it should be."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


def write() -> None:
    """Put the tables of all hooks on their pages."""
    for page in PAGES.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
