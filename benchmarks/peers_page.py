"""Make pages and pictures of the numbers in peers.json: a bar for each package, ours as the line at 1.

``bench_peers`` calls `keep` with what it has measured, and `write_pages`. Nothing is measured here, and no package of a
peer is needed, so that ``bench_peers --draw`` works anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contests import NOTHING, Result
from measure import Row, Spread
from results import head_lines

__all__ = ["NUMBERS", "draw", "keep", "load", "losses", "replaced", "sentence", "write_pages"]

NUMBERS = Path(__file__).with_name("peers.json")
ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

TITLES = {
    "capture": "Capture and patch",
    "statistics": "Statistics of every layer",
    "dispatch": "Firing of lifecycle hooks",
    "guard": "An intervention, and the run as it was",
    "debuggers": "Recording every module of a training step",
}
"""The families, in the order of the pages."""

TEXT, THEIRS, AHEAD, OURS = "#757e88", "#8c959f", "#c05621", "#2b7de0"
"""Greys and colours that can be read on white and on near-black: the pictures have no background."""
TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
STYLE: Mapping[str, Any] = {
    "font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
    "axes.edgecolor": TEXT, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5,
    "axes.titlecolor": TEXT, "savefig.dpi": 140, "savefig.transparent": True, "figure.constrained_layout.use": True,
}  # fmt: skip


# -- the numbers -----------------------------------------------------------------------------------------------------


def keep(path: Path, family: str, found: Sequence[Result]) -> None:
    """Put the results of a family into the file, in place of the older ones of that family."""
    families = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    families[family] = {"head": head_lines("CPU"), "results": [_plain(result) for result in found]}
    parts = [_lines(name, families[name]) for name in TITLES if name in families]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _lines(name: str, family: Mapping[str, Any]) -> str:
    """Return a family as JSON with a line for each result, so that a change shows as such."""
    lines = [json.dumps(result, ensure_ascii=False) for result in family["results"]]
    return f'"{name}": {{"head": {json.dumps(family["head"])}, "results": [\n' + ",\n".join(lines) + "\n]}"


def load(path: Path) -> dict[str, tuple[list[str], list[Result]]]:
    """Return for each family where and when it was measured, and its results."""
    families = json.loads(path.read_text(encoding="utf-8"))
    return {name: (family["head"], [_result(each) for each in family["results"]]) for name, family in families.items()}


def _plain(result: Result) -> dict[str, Any]:
    row = result.row
    figures = {"ratio": _numbers(row.ratio), "same": _numbers(row.same)} if result.has_figure else {}
    words = {"name": row.name, "ours": row.numerator, "theirs": row.denominator, "model": row.model}
    return {"work": result.work, "label": result.label, "why": result.why, **words, **figures, "measured": row.absolute}


def _numbers(spread: Spread) -> list[float]:
    return [float(f"{value:.4g}") for value in (spread.median, spread.low, spread.high)]


def _result(each: Mapping[str, Any]) -> Result:
    ratio, same = (Spread(*each[name]) if name in each else NOTHING for name in ("ratio", "same"))
    at_most = 1.0 if "ratio" in each else None
    words = (each["name"], each["ours"], each["theirs"], each["model"])
    return Result(each["work"], each["label"], Row(*words, ratio, same, each["measured"], at_most=at_most), each["why"])


# -- the pages -------------------------------------------------------------------------------------------------------


def write_pages(numbers: Path = NUMBERS) -> None:
    """Write the pictures, and what the pages say about them."""
    families = load(numbers)
    page, readme = ROOT / "docs" / "peers.md", ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    for name, (_, results) in families.items():
        draw(TITLES[name], results, PICTURES / f"peers_{name}.png")
        text = replaced(text, name, losses(results))
    page.write_text(text, encoding="utf-8")
    every = [result for _, results in families.values() for result in results]
    readme.write_text(replaced(readme.read_text(encoding="utf-8"), "peers", sentence(every)), encoding="utf-8")


def replaced(text: str, name: str, new: str) -> str:
    """Return the text with other words between the comments ``<!-- name -->`` and ``<!-- end of name -->``."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"no {begin} … {end} in the text; add both lines where the words belong")
    return f"{before}{begin}\n\n{new.strip()}\n\n{end}{rest.partition(end)[2]}"


def losses(results: Iterable[Result]) -> str:
    """Say where ours takes longer, how much and why; and who could not be measured."""
    results = list(results)
    by_reason: dict[str, list[str]] = {}
    for result in filter(is_lost, results):
        lost = f"{result.work}, against {result.label}: {result.row.ratio.median:.2g} times as long"
        by_reason.setdefault(result.why, []).append(lost)
    lines = [f"- {'; '.join(lost)}; {why}." for why, lost in by_reason.items()]
    if not lines:
        lines = ["- nowhere: each of these costs more for the same work, or as much."]
    missing = [
        f"- {result.label}, {result.work}: {result.row.absolute}." for result in results if not result.has_figure
    ]
    return "\n".join(["Where we lose, and why:", "", *lines, *(["", "Not measured:", "", *missing] if missing else [])])


def is_lost(result: Result) -> bool:
    """Return whether ours took longer, by more than the A/A spread."""
    return result.has_figure and result.row.ratio.median > max(1.0, result.row.same.high)


def sentence(results: Iterable[Result]) -> str:
    """Say in how many contests ours costs less, and name those in which it does not."""
    measured = [result for result in results if result.has_figure]
    ahead = sum(result.row.ratio.median < min(1.0, result.row.same.low) for result in measured)
    lost = dict.fromkeys(result.label for result in measured if is_lost(result))
    words = f"hookline costs less in {ahead} of {len(measured)} comparisons with other libraries"
    if lost:
        words += f", and more in {sum(map(is_lost, measured))} (with {', '.join(lost)})"
    return f"{words}: [why, and how it was measured](docs/peers.md)."


# -- the pictures ----------------------------------------------------------------------------------------------------


def draw(title: str, results: Sequence[Result], path: Path) -> None:
    """Draw the bars of a family, a panel for each work: how much more than ours each package costs."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    works = list(dict.fromkeys(result.work for result in results if result.has_figure))
    count = {work: sum(result.work == work and result.has_figure for result in results) for work in works}
    with mpl.rc_context(dict(STYLE)):
        figure, axes = plt.subplots(
            len(works), 1, figsize=(7.2, 0.5 + sum(0.62 + 0.27 * count[work] for work in works)),
            gridspec_kw={"height_ratios": [0.8 + count[work] for work in works]}, squeeze=False,
        )  # fmt: skip
        figure.suptitle(f"{title}: cost of others, ours = 1 (log scale)", x=0.01, ha="left", fontsize=10.5)
        for work, axis in zip(works, axes[:, 0], strict=True):
            _bars(axis, [result for result in results if result.work == work and result.has_figure])
            axis.set_title(work, loc="right")
            axis.annotate("hookline", (1.0, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, 2), fontsize=8,
                          textcoords="offset points", ha="right", color=OURS)  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def _bars(axis: Any, results: Sequence[Result]) -> None:
    ordered = sorted(results, key=lambda result: result.row.ratio.median)  # the dearest on top
    low, high = (widest(results, side) for side in ("low", "high"))
    axis.axvspan(low, high, color=OURS, alpha=0.25, linewidth=0)
    axis.axvline(1.0, color=OURS, linewidth=1.6)
    for place, result in enumerate(reversed(ordered)):
        times, least, most = inverse(result.row.ratio)
        colour = AHEAD if is_lost(result) else THEIRS
        axis.barh(place, times - 1.0, left=1.0, height=0.62, color=colour)
        axis.errorbar(times, place, xerr=[[times - least], [most - times]], color=TEXT, linewidth=1, capsize=2)
        axis.annotate(
            f"{times:,.0f}×" if times >= 100 else f"{times:.2g}×",
            (max(most, 1.0), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(range(len(ordered)), [plain(result.label) for result in reversed(ordered)])
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    edges = [edge for result in results for edge in inverse(result.row.ratio)]
    axis.set_xlim(min(0.7, min(edges) * 0.8), max(1.5, max(edges) * 1.6))
    inside = [value for value in TICKS if axis.get_xlim()[0] <= value <= axis.get_xlim()[1]]
    axis.set_xticks(inside, [f"{value:g}" for value in inside])


def widest(results: Sequence[Result], side: str) -> float:
    """Return the widest quartile of ours against itself."""
    found = [getattr(result.row.same, side) for result in results]
    return max(found) if side == "high" else min(found)


def inverse(ratio: Spread) -> tuple[float, float, float]:
    """Return theirs over ours, and its quartiles; what noise made negative is cut off at a tenth and ten times."""
    times = 1.0 / ratio.median
    least = 1.0 / ratio.high if ratio.high > 0 else times
    most = 1.0 / ratio.low if ratio.low > 0 else 10.0 * times
    return times, max(least, times / 10.0), min(most, times * 10.0)


def plain(label: str) -> str:
    """Return a label without the marks of code."""
    return re.sub("`", "", label)
