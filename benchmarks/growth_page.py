"""Draw the numbers in growth.json.

``growth`` calls `keep` with what it has measured, and `draw_all`. Nothing is measured here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers_page import AHEAD, OURS, PICTURES, STYLE, TEXT, THEIRS, plain
from results import head_lines

__all__ = ["NUMBERS", "Plot", "draw_all", "draw_plot", "keep"]

NUMBERS = Path(__file__).with_name("growth.json")
COLOURS = (OURS, AHEAD, "#3f8f5b", THEIRS, "#8763a8")


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over one quantity."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    log: bool = True


def keep(path: Path, part: str, plot: Plot) -> None:
    """Put the plot of a part into the file, in place of the older one."""
    parts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    series = {name: [[x, float(f"{y:.4g}")] for x, y in points] for name, points in plot.series.items()}
    parts[part] = {"head": head_lines("CPU"), "plot": {**asdict(plot), "series": series}}
    lines = [f'"{name}": {json.dumps(found, ensure_ascii=False)}' for name, found in parts.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def draw_all(numbers: Path = NUMBERS, pictures: Path = PICTURES) -> None:
    """Draw every part."""
    for part, found in json.loads(numbers.read_text(encoding="utf-8")).items():
        draw_plot(Plot(**found["plot"]), pictures / f"growth_{part}.png")


def draw_plot(plot: Plot, path: Path) -> None:
    """Draw the curves, each with its name at its end."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(dict(STYLE)):
        figure, axis = plt.subplots(figsize=(7.2, 2.9))
        for (name, points), colour in zip(plot.series.items(), COLOURS, strict=False):
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, linewidth=1.6,
                      label=plain(name))  # fmt: skip
        _scale(axis, plot)
        axis.set_xlabel(plot.x)
        axis.set_ylabel(plot.y)
        axis.set_title(plot.title, loc="left")
        axis.grid(axis="y", color=TEXT, alpha=0.25, linewidth=0.6)
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def _scale(axis: Any, plot: Plot) -> None:
    """Take logarithmic axes where a quantity spans magnitudes; memory begins at zero, so that flat looks flat."""
    if plot.log:
        axis.set_xscale("log")
        axis.set_yscale("log")
        places = [x for x, _ in next(iter(plot.series.values()))]
        axis.set_xticks(places, [f"{x:,.0f}" for x in places])
        axis.minorticks_off()
    else:
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(axis="x", style="plain")
