"""The picture of the analysis that looks at single layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from drawing import runs
from drawing.canvas import BLUE, ORANGE, RED, legend_above, logarithmic, panels


def draw_stats() -> Any:
    figure, (left, right) = panels(2, "std of outputs", "std of their gradients", below="layer of ten, from the input")
    for gain, label, colour in (
        (1.0, "1/n: too small", ORANGE),
        (2**0.5, "2/n: right", BLUE),
        (2.0, "4/n: too large", RED),
    ):
        run = runs.deep(nn.ReLU, gain)
        for axis, kind in ((left, "forward"), (right, "backward")):
            values = [run.at_end(f"stats/{2 * depth}/{kind}/std") for depth in range(10)]
            axis.plot(range(1, 11), values, color=colour, marker="o", markersize=3, label=label)
    for axis in (left, right):
        logarithmic(axis)
        axis.set_xticks(range(1, 11))
    legend_above(figure, left, "variance ")
    return figure
