"""What the pictures of the analyses have in common: colours, panels, lines."""

from __future__ import annotations

from typing import Any, Final

from drawing import runs
from drawing.runs import Run

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#c05621", "#3f8f5b", "#b3323a", "#7a7a7a"
COLOURS: Final = (BLUE, ORANGE, GREEN, RED, GREY, "#8763a8", "#111111")
STYLE: Final[dict[Any, Any]] = {
    "figure.dpi": 100,
    "savefig.dpi": 140,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#eeeeee",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "hookline",  # the same file every time
}


def panels(count: int = 2, *titles: str, below: str = "epoch", height: float = 2.7) -> tuple[Any, Any]:
    """A figure as wide as a page, with so many panels beside each other."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(7.2, height), squeeze=False)
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title)
    for axis in axes[0]:
        axis.set_xlabel(below)
    return figure, axes[0] if count > 1 else axes[0][0]


def line(axis: Any, run: Run, name: str, label: str = "", colour: str = BLUE, **style: Any) -> None:
    """One metric over time."""
    axis.plot(*run[name], label=label or None, color=colour, **style)


def logarithmic(axis: Any) -> None:
    """Powers of ten, without the marks between them, which make a third of a file."""
    axis.set_yscale("log")
    axis.minorticks_off()


def mark(axis: Any, value: float, text: str, *, above: bool = True) -> None:
    """A dashed line with a name: what the numbers are to be compared with."""
    axis.axhline(value, color=GREY, linewidth=1, linestyle="--")
    axis.annotate(
        text,
        (0.99, value),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom" if above else "top",
        color=GREY,
        fontsize=8,
    )


def turning_points(axis: Any, *, text: str = "top") -> None:
    """When the run of `mod_arithmetic` knows its pairs, and when the rule: 90 % of either; named at one end or not."""
    run = runs.grokking()
    for name, words in (("train_acc", "knows the pairs"), ("val_acc", "knows the rule")):
        epochs, values = run[f"training_metrics/{name}"]
        at = next(epoch for epoch, value in zip(epochs, values, strict=True) if value >= 0.9)
        axis.axvline(at, color=GREY, linewidth=1, linestyle=":")
        if text:
            place = (at, 0.99 if text == "top" else 0.02)
            over = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": text, "ha": "right"}
            axis.annotate(words, place, **over, color=GREY, fontsize=7.5)


def legend_above(figure: Any, axis: Any, words: str = "") -> None:
    """One legend for all panels, where no curve is."""
    handles, labels = axis.get_legend_handles_labels()
    labels = [f"{words}{label}" for label in labels]
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))


STRATEGIES: Final = {"random": BLUE, "fixed_random": ORANGE, "target": GREEN}
"""Orders of the data that several pictures compare."""
