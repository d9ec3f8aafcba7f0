"""Write the page of one run or several: a single HTML file that needs nothing else.

Users call `write_report`, the command line `write_page`; the page of a comparison takes its frame from here. It takes
runs from `report_runs`, findings from `anomalies`, and plotly's script; ``page.html``, ``page.css`` and the scripts
beside this file draw them.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline.errors import MissingPackageError
from hookline.files import replace_file
from hookline.plain import to_plain
from hookline.report.anomalies import count_judged, find_anomalies, may_be_cross_entropy, tell_findings
from hookline.report.metric_series import KINDS, Collector, Curve, Grid, LayerPlace, RunSeries, layer_places
from hookline.report.report_runs import (
    FLIGHT_FILE,
    RunData,
    distinct_names,
    find_runs,
    minutes_before,
    read_bad_steps,
    read_runs,
)

_SCRIPTS: Final = (
    "data.js", "url.js", "draw.js", "maps.js", "files.js", "print.js",
    "facts.js", "compare.js", "metrics.js", "layers.js", "live.js", "page.js",
)  # fmt: skip
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
"""A page is whole: the browser refuses every request it makes."""
_MAX_VALUES: Final = 4_000_000
"""Of all runs together; 200 layers × 2,000 steps × 9 statistics are 3.6 million, in a file of about 10 MB."""
_ENDED: Final = ("finished", "failed", "stopped")
"""What a run that has ended has for its status."""
_MIN_POINTS: Final = 100
"""No series is thinned further than this."""
_LARGEST: Final = float(np.finfo(np.float32).max)
_SHORT: Final = np.uint32(0xFFFFFF00)
"""Without its last 8 bits a number is still right to 1 in 65,000; the page shows four or five digits of it."""


def write_report(runs: Sequence[str | Path] | str | Path, out: str | Path | None = None) -> Path:
    """Write the page of one run, or of several laid over each other.

    Recipe: ``write_report(["runs/mod_arithmetic/stride"])`` writes ``runs/mod_arithmetic/stride/report.html``.

    The file opens from disk without a network. A run that is still going, has recorded nothing, or was killed in the
    middle of a line has a page as well, which says so.

    Args:
        runs: Folders of runs, logs by themselves, or folders that hold runs (``runs/mod_arithmetic`` for all of its
            strategies).
        out: The file; by default ``report.html`` in the first of the folders.

    Returns:
        Where the page is.
    """
    return write_page(runs, out).path


class WrittenPage(NamedTuple):
    """A page that was written."""

    path: Path
    found: list[str]
    """What was found, as lines for a terminal."""
    is_over: bool
    """Whether all of its runs say that they have ended."""


def write_page(
    runs: Sequence[str | Path] | str | Path, out: str | Path | None = None, *, live: float = 0.0
) -> WrittenPage:
    """Write the page as `write_report` does; with ``live``, one that loads itself anew every so many seconds."""
    given = [runs] if isinstance(runs, (str, Path)) else list(runs)
    folders = find_runs(given)
    read = [run for folder in folders for run in read_runs(folder, Collector)]
    distinct_names(read)
    first = Path(given[0])
    path = Path(out) if out is not None else (first if first.is_dir() else folders[0].parent) / "report.html"
    judged = [judge(run) for run in read]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_over = all(one.run.facts.get("status") in _ENDED for one in judged)
    replace_file(path, _page(judged, 0.0 if is_over else live))
    lines = [(f"{one.run.name}: ", tell_findings(one.anomalies, one.looked)) for one in judged]
    found = [name * (len(judged) > 1) + line for name, told in lines for line in told]
    return WrittenPage(path, found, is_over)


def _page(judged: list[JudgedRun], live: float) -> str:
    runs = [one.run for one in judged]
    recorded = [(run.name, run.folder) for run in runs if (run.folder / FLIGHT_FILE).is_file()]
    here = files("hookline.report")
    parts = {
        "script": "\n".join((here / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "plotly": packed_plotly(),
        "data": base64.b64encode(packed_runs(judged)).decode(),
        "minutes": minutes_before(recorded) if recorded else "",
    }
    body = fill_template((here / "page.html").read_text(encoding="utf-8"), parts)
    style = (here / "page.css").read_text(encoding="utf-8")
    title = " · ".join(run.name for run in runs)
    return whole_page(body, title=title, style=style, attributes=f' data-live="{live:g}"' if live else "")


@cache
def packed_plotly() -> str:
    """Return plotly's script, which sets ``window.Plotly``: compressed, in base64 (2 MB)."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackageError(
            "The page of a run is drawn by plotly, which comes with hookline and is not here. Next: pip install plotly."
        ) from error
    script: str = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """Return ``template`` with each ``{{name}}`` replaced; what comes in by this is not searched for more of them.

    Recipe: ``fill_template("<h1>{{title}}</h1>", {"title": "Runs"})``.
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def whole_page(body: str, *, title: str, style: str, attributes: str = "") -> str:
    """Return the HTML file of a page.

    Recipe: ``whole_page("<main>…</main>", title="two runs", style="body { margin: 0 }")``.

    Args:
        body: HTML, as it is.
        title: Text, which is escaped here.
        style: CSS.
        attributes: Further attributes of the ``html`` element, with a blank before each.
    """
    frame = (files("hookline.report") / "frame.html").read_text(encoding="utf-8")
    parts = {"body": body, "title": html.escape(title), "style": style, "policy": _POLICY, "attributes": attributes}
    return fill_template(frame, parts)


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run with its series, and what was found in them."""

    run: RunData[Any]
    series: RunSeries
    places: dict[str, LayerPlace]
    """The place of each metric that is on a map."""
    anomalies: list[dict[str, Any]]
    looked: dict[str, Any]
    """How many curves could be judged."""


def judge(run: RunData[Collector]) -> JudgedRun:
    """Return a run with its series, searched for anomalies."""
    series = run.collected.series(run.started)
    series.curves = list(_with_meaning(series.curves))
    places = layer_places(curve.name for curve in series.curves)
    found = find_anomalies(run.facts, series, places, read_bad_steps(run.folder))
    return JudgedRun(run, series, places, found, count_judged(run.facts, series, places))


def _with_meaning(curves: Sequence[Curve]) -> Iterator[Curve]:
    """Yield all curves but the perplexity of a loss that is no cross entropy, or has risen so far that it is infinite.

    Of a square error of 500 it is 1e217, and of a loss of 710 too large for a float: no reader wants to know either.
    """
    by_name = {curve.name: curve for curve in curves}
    for curve in curves:
        base, _, name = curve.name.rpartition("/")
        loss = by_name.get(f"{base}/loss") if name == "perplexity" else None
        is_known = loss is None or np.isfinite(loss.values).sum() <= np.isfinite(curve.values).sum()
        if is_known and (loss is None or may_be_cross_entropy(loss)):
            yield curve


def packed_runs(judged: Sequence[JudgedRun]) -> bytes:
    """Return runs as the page unpacks them."""
    packer = Packer()
    limit = _max_points([one.series for one in judged], _MAX_VALUES)
    header = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [_run(one, packer, limit) for one in judged],
    }
    return packer.compress(header)


def _max_points(all_series: list[RunSeries], most: int) -> int:
    """Return how many points a series may keep, so that all have ``most`` together."""
    lengths = [curve.steps.size for series in all_series for curve in series.curves]
    lengths += [grid.steps.size for series in all_series for grid in series.grids for _ in grid.bins]
    limit = max(lengths, default=0)
    sizes = np.asarray(lengths)
    while limit > _MIN_POINTS and int(np.minimum(sizes, limit).sum()) > most:
        limit = max(_MIN_POINTS, limit * 3 // 4)
    return limit


def _run(judged: JudgedRun, packer: Packer, limit: int) -> dict[str, Any]:
    run, series, places = judged.run, judged.series, judged.places
    clock = series.clock
    longest = max((curve.steps.size for curve in series.curves), default=0)
    thinned = (
        f"There is more than a page can hold: series of up to {longest:,} points are drawn by {limit:,}, of which each "
        "stretch keeps its smallest and largest. The log has all of them."
    )
    return {
        "name": run.name,
        "folder": run.folder.resolve().name,
        "facts": to_plain(run.facts),
        "remarks": run.remarks + ([thinned] if longest > limit else []),
        "records": series.num_records,
        "words": series.words,
        "clock": {"steps": clock.steps, "seconds": clock.seconds, "epochs": clock.epochs},
        "anomalies": judged.anomalies,
        "looked": judged.looked,
        "groups": list(_groups(series.curves, places)),
        "curves": [_curve(curve, places.get(curve.name), packer, limit) for curve in series.curves],
        "grids": [_grid(grid, run.facts, packer, limit) for grid in series.grids],
    }


def _curve(curve: Curve, place: LayerPlace | None, packer: Packer, limit: int) -> dict[str, Any]:
    steps, values = thin(curve.steps, curve.values[None], limit)
    packed = {"name": curve.name, "steps": packer.steps(steps), "at": packer.values(values, short=place is not None)}
    if curve.same_as:
        packed["same"] = curve.same_as
    return packed if place is None else {**packed, "layer": place.layer}


def _grid(grid: Grid, facts: Mapping[str, Any], packer: Packer, limit: int) -> dict[str, Any]:
    steps, values = thin(grid.steps, grid.values, limit)
    place = {"steps": packer.steps(steps), "at": packer.values(values, short=True)}
    return {"name": grid.name, **place, "bins": grid.bins, "counts": grid.counts, "keys": _keys(grid, facts)}


def _keys(grid: Grid, facts: Mapping[str, Any]) -> str:
    """Return what the rows of a grid are: as the metric's hook declares, else by their form."""
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


def _groups(curves: Sequence[Curve], places: dict[str, LayerPlace]) -> Iterator[dict[str, Any]]:
    """Yield the maps: their rows in the order of the model, and by statistic the curve of each row."""
    found: dict[str, dict[str, dict[int, int]]] = {}
    rows: dict[str, dict[str, int]] = {}
    for index, curve in enumerate(curves):
        if place := places.get(curve.name):
            layers = rows.setdefault(place.group, {})
            row = layers.setdefault(place.layer, len(layers))
            found.setdefault(place.group, {}).setdefault(place.statistic, {})[row] = index
    for group, statistics in sorted(found.items(), key=lambda item: _map_order(item[0])):
        of_rows = [{"name": name, "curves": sorted(by_row.items())} for name, by_row in statistics.items()]
        yield {"name": group, "layers": list(rows[group]), "statistics": of_rows}


def _map_order(group: str) -> int:
    """Return the place of a map: activations and gradients before parameters, then other groups as first seen."""
    kind = group.rsplit("/", 1)[-1]
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


# -- packing ------------------------------------------------------------------------------------------------------


class Packer:
    """Packs arrays as bytes, which the page unpacks; series with the same steps share them.

    As text, two million numbers are 20 MB and a second of parsing; packed they are 5 MB and 50 ms.
    """

    def __init__(self) -> None:
        self._floats: list[NDArray[np.float32]] = []
        self._num_floats = 0
        self._steps: dict[bytes, int] = {}
        self.step_lists: list[dict[str, int]] = []
        """Where each list of steps is: ``{"first", "every", "count"}`` or, if uneven, ``{"at", "count"}``."""
        self._uneven: list[NDArray[np.int32]] = []
        self._num_uneven = 0

    def steps(self, steps: NDArray[np.int64]) -> int:
        """Add a list of steps; return its number."""
        key = steps.tobytes()
        if key not in self._steps:
            self._steps[key] = len(self.step_lists)
            self.step_lists.append(self._placed(steps))
        return self._steps[key]

    def _placed(self, steps: NDArray[np.int64]) -> dict[str, int]:
        gaps = np.diff(steps)
        if steps.size and (steps.size < 2 or bool((gaps == gaps[0]).all())):
            return {"first": int(steps[0]), "every": int(gaps[0]) if gaps.size else 1, "count": int(steps.size)}
        self._uneven.append(steps.astype(np.int32))
        self._num_uneven += steps.size
        return {"at": self._num_uneven - steps.size, "count": int(steps.size)}

    def values(self, values: NDArray[np.float64], *, short: bool = False) -> int:
        """Add numbers; return their place. ``short`` drops digits that a colour does not show."""
        # What float32 cannot hold is not infinite; NaN and infinities go through clip as they are, told apart here.
        clipped = np.where(np.isinf(values), values, np.clip(values, -_LARGEST, _LARGEST)).astype(np.float32)
        self._floats.append(_shortened(clipped).reshape(-1) if short else clipped.reshape(-1))
        self._num_floats += values.size
        return self._num_floats - values.size

    def compress(self, header: dict[str, Any]) -> bytes:
        """Return everything, compressed: the length of the header, the header as JSON, the numbers."""
        floats = np.concatenate([*self._floats, np.empty(0, np.float32)])
        uneven = np.concatenate([*self._uneven, np.empty(0, np.int32)])
        counts = {"floats": floats.size, "ints": uneven.size}
        text = json.dumps(
            {**header, "steps": self.step_lists, "counts": counts}, allow_nan=False, separators=(",", ":")
        )
        head = text.encode()
        head += b" " * (-(len(head) + 4) % 4)  # integers have to begin at a multiple of 4
        # All first bytes, then all second bytes, …: signs and exponents repeat, so gzip finds them.
        planes = floats.astype("<f4").view(np.uint8).reshape(-1, 4).T.tobytes()
        block = len(head).to_bytes(4, "little") + head + uneven.astype("<i4").tobytes() + planes
        return gzip.compress(block, 6, mtime=0)


def _shortened(values: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x80)) & _SHORT).view(np.float32)
    # Rounding up must not make an infinity of a number, nor a number of a NaN.
    return np.where(np.isfinite(rounded) & np.isfinite(values), rounded, values)


def thin(
    steps: NDArray[np.int64], values: NDArray[np.float64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most ``limit`` of the columns of ``values`` (rows, steps), with every peak kept.

    Steps are taken together; of each stretch, a row keeps its smallest and its largest number in the order they came,
    and what is not finite before either. They are put at the first step and the middle one.
    """
    count = steps.size
    if count <= limit:
        return steps, values
    size = -(-count // max(1, limit // 2))
    starts = np.arange(0, count, size)
    middles = np.minimum(starts + size // 2, count - 1)  # so that columns are evenly spaced
    padded = np.pad(values, ((0, 0), (0, starts.size * size - count)), mode="edge").reshape(len(values), -1, size)
    low, high = _extremes(padded)
    pairs = np.sort(np.stack([low, high], -1), -1)  # (rows, stretches, 2)
    kept = np.take_along_axis(padded, pairs, -1).reshape(len(values), -1)
    at = np.stack([starts, middles], -1).reshape(-1)
    whole = np.concatenate([[True], np.diff(at) > 0])  # a last stretch of one step has one column
    return steps[at[whole]], kept[:, whole]


def _extremes(values: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where the smallest and largest are, (rows, stretches); in a stretch with a value not finite, that one."""
    bad = ~np.isfinite(values)
    finite = np.where(bad, 0.0, values)
    low = np.where(bad, np.inf, finite).argmin(-1)
    high = np.where(bad, -np.inf, finite).argmax(-1)
    return np.where(bad.any(-1), bad.argmax(-1), low), high
