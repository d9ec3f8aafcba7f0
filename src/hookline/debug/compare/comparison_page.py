"""Write the page of a comparison: a heat map of layer by call, and the values; one HTML file that needs nothing else.

`Comparison.write_html` calls `write_page`; ``comparison.html``, ``.css`` and ``.js`` beside this file draw it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from hookline.debug.compare.compared_value import ComparedValue
from hookline.files import replace_file
from hookline.report.report_page import fill_template, whole_page

__all__ = ["PageContent", "write_page"]

_BOUNDS: Final = (0.0, 1.0, 3.0, 8.0, 64.0, 1e3, 1e5)
"""Up to how many times the rounding each colour goes; beyond the last there is one more."""
_LEVELS: Final = (
    "equal to the bit", "up to rounding", "3× (still rounding)", "8×", "64×", "1,000×", "100,000×", "more",
    "NaN or Inf in one alone",
)  # fmt: skip
_MAX_VALUES: Final = 20_000
"""A page of so many values is 8 MB, and a browser still draws it at once."""


@dataclass(frozen=True, slots=True)
class PageContent:
    """What the page of a comparison shows."""

    names: tuple[str, str]
    is_same: bool
    headline: Sequence[str]
    remarks: Sequence[str]
    values: Sequence[ComparedValue]
    """In the order of the calls."""
    worst: Sequence[ComparedValue]
    """The same, the largest error first."""
    firsts: Sequence[ComparedValue]
    """Where the runs part."""


def write_page(content: PageContent, path: str | Path) -> Path:
    """Write the page of a comparison; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _page(content))
    return path


def _page(content: PageContent) -> str:
    here = files("hookline.debug.compare")
    values, cut = _shown(content)
    remarks = [*content.remarks, *([cut] if cut else [])]
    title = " and ".join(_short_names(content.names))
    parts = {
        "title": html.escape(title),
        "state": "same" if content.is_same else "differs",
        "summary": html.escape("\n".join(content.headline)),
        "remarks": f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in remarks)}</ul>" if remarks else "None.",
        "script": (here / "comparison.js").read_text(encoding="utf-8"),
        # "<" would end the script element inside of a name.
        "data": json.dumps(_data(content, values), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    body = fill_template((here / "comparison.html").read_text(encoding="utf-8"), parts)
    return whole_page(body, title=title, style=(here / "comparison.css").read_text(encoding="utf-8"))


def _short_names(names: tuple[str, str]) -> list[str]:
    """Return the last parts of two paths, unless they are the same."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == 2 else list(names)


def _shown(content: PageContent) -> tuple[Sequence[ComparedValue], str]:
    """Return the values that the page holds, in the order of the calls, and a remark if they are not all."""
    values = content.values
    if len(values) <= _MAX_VALUES:
        return values, ""
    kept = {id(value) for value in content.worst[:_MAX_VALUES]}
    text = f"The page shows the {_MAX_VALUES:,} values with the largest errors, of {len(values):,}."
    return [value for value in values if id(value) in kept], text


def _data(content: PageContent, values: Sequence[ComparedValue]) -> dict[str, Any]:
    places = {id(value): place for place, value in enumerate(values)}
    kinds = list(dict.fromkeys(value.kind for value in values))
    firsts = {id(value) for value in content.firsts}
    if content.firsts:  # the map that shows where the runs part comes first
        kinds.sort(key=lambda kind: kind != content.firsts[0].kind)
    return {
        "levels": _LEVELS,
        "values": [{**_value(value), "first": id(value) in firsts} for value in values],
        "worst": [places[id(value)] for value in content.worst if id(value) in places],
        "maps": [
            _map(kind, [(places[id(value)], value) for value in values if value.kind == kind], firsts) for kind in kinds
        ],
    }


def _value(value: ComparedValue) -> dict[str, Any]:
    errors, mark = value.errors, "~" if value.errors.is_estimate and not value.errors.is_equal else ""
    numbers = {"max": errors.max_abs, "mean": errors.mean_abs, "rel": errors.rel_l2, "diff": errors.rel_diff}
    keys = ("site", "kind", "leaf", "step", "call", "rank", "verdict", "where", "follows", "how")
    return {
        **{key: getattr(value, key) for key in keys},
        "level": _level(value),
        "shown": {**{key: f"{mark}{number:.3g}" for key, number in numbers.items()}, "floor": f"{value.floor:.2g}"},
    }


def _level(value: ComparedValue) -> int:
    if value.errors.mismatched:
        return len(_BOUNDS) + 1
    if value.errors.is_equal:
        return 0
    ratio = value.ratio if math.isfinite(value.ratio) else math.inf
    return next((level for level, bound in enumerate(_BOUNDS) if level and ratio <= bound), len(_BOUNDS))


def _weight(value: ComparedValue, firsts: set[int]) -> tuple[bool, float]:
    return id(value) in firsts, value.error


def _map(kind: str, values: list[tuple[int, ComparedValue]], firsts: set[int]) -> dict[str, Any]:
    """Return one heat map: rows are layers, columns are the parts of a layer, for each call."""
    placed = [(place, value, *_layer_and_part(value)) for place, value in values]
    rows = _unique(layer for _, _, layer, _ in placed)
    parts = _unique(part for *_, part in sorted(placed, key=lambda item: item[3] == ""))
    calls = _unique(_call_name(value) for _, value, _, _ in placed)
    shown = dict(values)
    cells = [[-1] * (len(parts) * len(calls)) for _ in rows]
    for place, value, layer, part in placed:
        column = calls.index(_call_name(value)) * len(parts) + parts.index(part)
        row = cells[rows.index(layer)]
        # Of several leaves the one where the runs part is shown, else the worst.
        if row[column] < 0 or _weight(shown[row[column]], firsts) < _weight(value, firsts):
            row[column] = place
    return {"kind": kind, "rows": rows, "parts": parts, "calls": calls, "cells": cells}


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _call_name(value: ComparedValue) -> str:
    rank = f" rank {value.rank}" if value.rank else ""
    return f"step {value.step}, call {value.call}{rank}"


def _layer_and_part(value: ComparedValue) -> tuple[str, str]:
    """Return the layer of a value, up to the first number in its name, and what comes behind it."""
    parts = value.site.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if number is None:
        return value.site or "(the model)", ""
    return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])
