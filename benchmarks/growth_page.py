"""Make plots and tables of the numbers in growth.json.

``growth`` calls `keep` with what it has measured, and `write_page`. Nothing is measured here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers_page import AHEAD, OURS, PICTURES, ROOT, STYLE, TEXT, THEIRS, plain, replaced
from results import head_lines

__all__ = ["NUMBERS", "Plot", "draw_plot", "keep", "table_of", "write_page"]

NUMBERS = Path(__file__).with_name("growth.json")
PAGE = ROOT / "docs" / "scaling.md"
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
    parts[part] = {
        "head": head_lines("CPU"),
        "plot": {**asdict(plot), "series": series},
    }
    lines = [f'"{name}": {json.dumps(found, ensure_ascii=False)}' for name, found in parts.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_page(numbers: Path = NUMBERS, page: Path = PAGE, pictures: Path = PICTURES) -> None:
    """Draw every part, and write its table into the page."""
    text = page.read_text(encoding="utf-8")
    for part, found in json.loads(numbers.read_text(encoding="utf-8")).items():
        plot = Plot(**found["plot"])
        draw_plot(plot, pictures / f"growth_{part}.png")
        text = replaced(text, f"growth of {part}", table_of(plot, found["head"]))
    page.write_text(text, encoding="utf-8")


def table_of(plot: Plot, where: list[str]) -> str:
    """Return the figures as a table, a column for each curve, and where they were measured."""
    names, places = list(plot.series), [x for x, _ in next(iter(plot.series.values()))]
    values = {name: dict(points) for name, points in plot.series.items()}
    lines = [f"| {plot.x} | " + " | ".join(f"{name} ({plot.y})" for name in names) + " |",
             "|---:|" + "---:|" * len(names)]  # fmt: skip
    lines += [f"| {x:,.0f} | " + " | ".join(f"{values[name][x]:.3g}" for name in names) + " |" for x in places]
    machine = "; ".join(part.partition(": ")[2] for part in where)
    return "\n".join([*lines, "", f"Measured on {machine}."])


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
