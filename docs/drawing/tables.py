"""The tables of metrics and options on the pages of docs/analyses, written from the hooks themselves.

Takes ``describe_metrics`` and the arguments of every built-in hook, hands back Markdown, and puts it between the marks
on its page; `tests/analyses/test_analyses_pages.py` fails where a page says something else.
"""

from __future__ import annotations

import inspect
import re
from itertools import product
from pathlib import Path
from typing import Any, Final

import hookline.analyses
from hookline import MetricInfo
from hookline.analyses import BUILT_IN

PAGES: Final = Path(__file__).parents[1] / "analyses"
_MARKED: Final = re.compile(r"(<!-- (metrics|options) -->\n).*?(<!-- end -->)", re.DOTALL)

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


def options(name: str) -> list[tuple[str, str, str]]:
    """Name, default and description of every argument."""
    said = _documented(inspect.getdoc(hook_class(name)) or "")
    parameters = list(inspect.signature(hook_class(name)).parameters.values())
    return [(each.name, _default(each.default), said.get(each.name, "")) for each in parameters]


def _default(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value)
    return f"`{value!r}`" if isinstance(value, str) else "" if value is None else f"`{value}`"


def _documented(text: str) -> dict[str, str]:
    """What the docstring says of each argument, in one line."""
    _, _, rest = text.partition("Args:\n")
    found: dict[str, str] = {}
    for line in rest.splitlines():
        if not line.strip():
            break
        begun = re.match(r"    (\w+): (.*)", line)
        if begun:
            name = begun[1]
            found[name] = begun[2]
        else:
            found[name] += f" {line.strip()}"
    return {name: words.replace("``", "`") for name, words in found.items()}


def table(name: str, what: str) -> str:
    """The Markdown between two marks."""
    if what == "metrics":
        head: tuple[str, ...] = ("metric", "what it is", "formula", "how to read it")
        rows: list[tuple[str, ...]] = [(f"`{m.name}`", m.description, m.formula, m.sign_info) for m in metrics(name)]
    else:
        head = ("option", "default", "what it does")
        rows = [(f"`{option}`", default, words) for option, default, words in options(name)]
    if not rows:
        return "None.\n"
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(_safe(cell) for cell in line)} |\n" for line in lines)


def _safe(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*") if "`" not in cell else cell.replace("|", "\\|")


def with_tables(name: str, text: str) -> str:
    """A page as it should be."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(name, found[2])}{found[3]}", text)


def write() -> None:
    """Put the tables of all hooks on their pages."""
    for name in BUILT_IN:
        page = PAGES / f"{name}.md"
        page.write_text(with_tables(name, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
