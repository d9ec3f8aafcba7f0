"""Write the page of a comparison: what was found, a map of layer by call, and the values; one HTML file, no script.

`Comparison.write_html` calls `write_page`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from hookline.debug.compare.key import Pair
from hookline.files import replace_file
from hookline.notebook_html import ColourScale, line
from hookline.tables import THE_MODEL, Table

__all__ = ["write_page"]

_SCALE: Final = ColourScale(-3.0, 6.0)
"""Powers of ten of error / rounding: blue is less than rounding, red is more, yellow is NaN or Inf in one alone."""
_STYLE: Final = """
:root { color-scheme: light dark; }
body { margin: 24px; font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
section { margin-top: 24px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 8px; white-space: nowrap; }
"""


def write_page(
    path: str | Path, names: tuple[str, str], headline: Sequence[str], values: Sequence[Pair], table: str
) -> Path:
    """Write the page of a comparison; return its path.

    Args:
        path: The file.
        names: What the runs are called.
        headline: What was found.
        values: What was compared; there is a map for each kind, in this order.
        table: The HTML of the values.
    """
    from hookline.report.report_page import whole_page

    path, title = Path(path), " and ".join(_short_names(names))
    kinds = dict.fromkeys(value.kind for value in values)
    maps = [_map(kind, [value for value in values if value.kind == kind]).html() for kind in kinds]
    verdict = line("\n".join(headline))
    sections = [f'<div id="verdict">{verdict}</div>', *maps, table]
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    # There is no script that would draw anything: the page is ready as it is.
    page = whole_page(f"<h1>{escape(title)}</h1>{body}", title=title, style=_STYLE, attributes=" data-ready")
    replace_file(path, page)
    return path


def _short_names(names: tuple[str, str]) -> Sequence[str]:
    """Return the last parts of two paths, unless they are the same."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == 2 else names


def _map(kind: str, values: Sequence[Pair]) -> Table:
    """Return one map: rows are layers, columns the parts of a layer at each call; of several leaves the worst shows."""
    cells: dict[str, dict[str, Pair]] = {}
    for value in sorted(values, key=lambda value: value.ratio):
        layer, part = _layer_and_part(value.site)
        rank = f" rank {value.rank}" if value.rank else ""
        cells.setdefault(layer, {})[f"{part} {value.step}.{value.call}{rank}".strip()] = value
    layers = list(dict.fromkeys(_layer_and_part(value.site)[0] for value in values))
    columns = sorted(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [(layer, *(_power(cells[layer].get(column)) for column in columns)) for layer in layers]
    title = f"{kind}: the power of ten of error / rounding, for each layer, and its parts at each step.call"
    return Table(("layer", *columns), rows, numbers=range(1, len(columns) + 1), title=title, heat=_SCALE)


def _power(value: Pair | None) -> str:
    if value is None:
        return ""
    if value.errors.is_equal:
        return "="
    return "nan" if value.errors.mismatched else f"{min(math.log10(max(value.ratio, 1e-3)), 6.0):.1f}"


def _layer_and_part(site: str) -> tuple[str, str]:
    """Return the layer of a value, up to the first number in its name, and what comes behind it."""
    parts = site.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if number is None:
        return site or THE_MODEL, ""
    return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])
