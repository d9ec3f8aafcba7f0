"""The page of one run or several: a single HTML file that needs nothing else.

Takes `RunData` from `runs`, findings from `anomalies` and plotly's script from its package; what they look like is
decided in `page.html`, `page.css` and the scripts beside this file.
"""

from __future__ import annotations

import base64
import gzip
import html
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from hookline.report.anomalies import find_anomalies, looked_at
from hookline.report.metric_families import KINDS, Place, places
from hookline.report.metric_series import Curve, Grid
from hookline.report.packed_numbers import Packer, squeezed, thinned
from hookline.report.plotly_script import plotly_script
from hookline.report.report_runs import RunData, distinct_names, find_runs, read_run

__all__ = ["write_report"]

_SCRIPTS: Final = (
    "data.js", "url.js", "draw.js", "maps.js", "files.js", "print.js",
    "facts.js", "compare.js", "metrics.js", "layers.js", "page.js",
)  # fmt: skip
_MAX_VALUES: Final = 4_000_000
"""Of all runs together; 200 layers × 2,000 steps × 9 statistics are 3.6 million, in a file of about 10 MB."""
_MIN_POINTS: Final = 100
"""No series is thinned further than this."""


def write_report(runs: Sequence[str | Path] | str | Path, out: str | Path | None = None) -> Path:
    """Write the page of one run, or of several laid over each other.

    Recipe: ``write_report(["runs/digits/default"])`` writes ``runs/digits/default/report.html``.

    The file opens from disk without a network. A run that is still going, has recorded nothing, or was killed in the
    middle of a line has a page as well, which says so.

    Args:
        runs: Folders of runs, logs by themselves, or folders that hold runs (``runs/mod_arithmetic`` for all of its
            strategies).
        out: The file; by default ``report.html`` in the first of the folders.

    Returns:
        Where the page is.
    """
    given = [runs] if isinstance(runs, (str, Path)) else list(runs)
    folders = find_runs(given)
    found = [run for folder in folders for run in read_run(folder)]
    distinct_names(found)
    path = Path(out) if out is not None else _beside(folders, given) / "report.html"
    _replace(path, _page(found))
    return path


def _beside(folders: Sequence[Path], given: Sequence[str | Path]) -> Path:
    """The folder that was named first: of one that holds several runs, itself."""
    first = Path(given[0])
    return first if first.is_dir() else folders[0].parent


def _replace(path: Path, text: str) -> None:
    """Write the file as a whole: who looks at it meanwhile sees the old page or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _page(runs: list[RunData]) -> str:
    here = files("hookline.report")
    parts = {
        "title": html.escape(" · ".join(run.name for run in runs)),
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((here / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "plotly": _plotly(),
        "data": _data(runs),
    }
    template = (here / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


@cache
def _plotly() -> str:
    """Compressed, it is 0.5 MB of the page."""
    return base64.b64encode(gzip.compress(plotly_script().encode(), 9, mtime=0)).decode()


def _data(runs: list[RunData]) -> str:
    packer = Packer()
    limit = _limit(runs)
    header = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [_run(run, packer, limit) for run in runs],
    }
    return squeezed(header, packer)


def _limit(runs: list[RunData]) -> int:
    """How many points a series may keep."""
    lengths = [curve.steps.size for run in runs for curve in run.series.curves]
    lengths += [grid.steps.size for run in runs for grid in run.series.grids for _ in grid.bins]
    limit = max(lengths, default=0)
    sizes = np.asarray(lengths)
    while limit > _MIN_POINTS and int(np.minimum(sizes, limit).sum()) > _MAX_VALUES:
        limit = max(_MIN_POINTS, limit * 3 // 4)
    return limit


def _run(run: RunData, packer: Packer, limit: int) -> dict[str, Any]:
    series, clock = run.series, run.series.clock
    where = places(curve.name for curve in series.curves)
    longest = max((curve.steps.size for curve in series.curves), default=0)
    return {
        "name": run.name,
        "folder": run.folder.resolve().name,
        "facts": _plain(run.facts),
        "remarks": run.remarks + ([_thinning(longest, limit)] if longest > limit else []),
        "records": series.num_records,
        "words": series.words,
        "clock": {"steps": clock.steps, "seconds": clock.seconds, "epochs": clock.epochs},
        "anomalies": find_anomalies(run.facts, series, where),
        "looked": looked_at(run.facts, series, where),
        "groups": list(_groups(series.curves, where)),
        "curves": [_curve(curve, where.get(curve.name), packer, limit) for curve in series.curves],
        "grids": [_grid(grid, run.facts, packer, limit) for grid in series.grids],
    }


def _thinning(longest: int, limit: int) -> str:
    return (
        f"There is more than a page can hold: series of up to {longest:,} points are drawn by {limit:,}, of which each "
        "stretch keeps its smallest and largest. The log has all of them."
    )


def _curve(curve: Curve, place: Place | None, packer: Packer, limit: int) -> dict[str, Any]:
    steps, values = thinned(curve.steps, curve.values[None], limit)
    packed = {"name": curve.name, "steps": packer.steps(steps), "at": packer.values(values, short=place is not None)}
    if curve.same_as:
        packed["same"] = curve.same_as
    return packed if place is None else {**packed, "layer": place.layer}


def _grid(grid: Grid, facts: Mapping[str, Any], packer: Packer, limit: int) -> dict[str, Any]:
    steps, values = thinned(grid.steps, grid.values, limit)
    place = {"steps": packer.steps(steps), "at": packer.values(values, short=True)}
    told = {"bins": grid.bins, "counts": grid.counts, "keys": _keys(grid, facts)}
    return {"name": grid.name, **place, **told}


def _keys(grid: Grid, facts: Mapping[str, Any]) -> str:
    """Return what the rows of a grid stand for: what the metric's hook declares, else what is known of their form."""
    hook, _, rest = grid.name.split(" ")[0].partition("/")
    for metric in facts.get("hooks", {}).get(hook, {}).get("metrics", ()):
        if metric.get("keys") and _matches(str(metric.get("name", "")), rest):
            return str(metric["keys"])
    if not grid.by_key:
        return "place in the list"
    *_, kind, statistic = ("", "", *rest.split("/"))
    # The histogram of a watch is known by its name: nothing else counts by binary exponent here.
    return "binary exponent" if statistic == "histogram" and kind in KINDS else "key"


def _matches(declared: str, name: str) -> bool:
    """Return whether a declared name is that of a metric; ``norm_{param}`` stands for one of each parameter."""
    pattern = "".join(".+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", declared))
    return re.fullmatch(pattern, name) is not None


def _groups(curves: Sequence[Curve], where: dict[str, Place]) -> Iterator[dict[str, Any]]:
    """The maps: their rows in the order of the model, and by statistic the curve of each row."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    rows: dict[str, dict[str, int]] = {}
    for index, curve in enumerate(curves):
        if place := where.get(curve.name):
            layers = rows.setdefault(place.group, {})
            row = layers.setdefault(place.layer, len(layers))
            found.setdefault(place.group, {}).setdefault(place.statistic, {})[row] = index
    for group, statistics in sorted(found.items(), key=lambda item: _turn(item[0])):
        of_rows = [{"name": name, "curves": sorted(by_row.items())} for name, by_row in statistics.items()]
        yield {"name": group, "layers": list(rows[group]), "statistics": of_rows}


def _turn(group: str) -> int:
    """What goes through the model before what it is made of; other groups as they were first seen."""
    kind = group.rsplit("/", 1)[-1]
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _plain(value: Any) -> Any:
    """Facts as JSON has them: what is not finite becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
