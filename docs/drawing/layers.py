"""Pictures of the analyses that look at single layers, and of the noise scale."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from drawing import runs
from drawing.canvas import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, legend_above, line, logarithmic, mark, panels
from drawing.runs import Run


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


def draw_gradient_flow() -> Any:
    figure, axis = panels(1, below="layer of ten, from the input")
    for kind, gain, label, colour in (
        (nn.ReLU, 2**0.5, "ReLU, weights of variance 2/n", BLUE),
        (nn.Tanh, 1.0, "tanh, 1/n", GREEN),
        (nn.Sigmoid, 1.0, "sigmoid, 1/n", RED),
    ):
        run = runs.deep(kind, gain)
        values = [run.at_end(f"gradient_flow/{2 * depth}/mean") for depth in range(10)]
        axis.plot(range(1, 11), values, color=colour, marker="o", markersize=3, label=label)
    logarithmic(axis)
    axis.set_xticks(range(1, 11))
    axis.set_ylabel("gradient_flow/{layer}/mean")
    mark(axis, 1e-8, "blocked below")
    axis.legend()
    return figure


RATES: Final = ((0.05, BLUE), (0.5, GREEN), (1.0, ORANGE), (2.0, RED))


def draw_relu_activations() -> Any:
    figure, (left, right) = panels(2, "dead_fraction", "how often each unit is on, at the end")
    for lr, colour in RATES:
        run = runs.relus(lr)
        line(left, run, "relu_activations/dead_fraction", f"lr {lr:g}", colour)
        values = sorted((run.at_end(name) for name in run.names("activations/relu/")), reverse=True)
        right.plot(range(1, len(values) + 1), values, color=colour)
    left.set_ylim(-0.02, 1.02)
    right.set_xlabel("units of three layers, sorted")
    left.legend(loc=(0.62, 0.52))
    return figure


def draw_relu_gradient_flow() -> Any:
    figure, (left, right) = panels(2, "blocked_fraction", "lr 0.5: on, and passing a gradient")
    for lr, colour in RATES:
        line(left, runs.relus(lr), "relu_gradient_flow/blocked_fraction", f"lr {lr:g}", colour)
    run = runs.relus(0.5)
    line(right, run, "relu_activations/active_fraction", "relu_activations/active_fraction", GREY)
    line(right, run, "relu_gradient_flow/passed_fraction", "relu_gradient_flow/passed_fraction", GREEN)
    left.set_ylim(-0.02, 1.02)
    right.set_ylim(0, 0.5)
    left.legend(loc=(0.62, 0.52))
    right.legend()
    return figure


def draw_saturated_activations() -> Any:
    figure, axes = panels(3, "fraction", "always_saturated, of 192", "loss")
    names = ("saturated_activations/fraction", "saturated_activations/always_saturated", "training_metrics/loss")
    for lr, colour in RATES:
        for axis, name in zip(axes, names, strict=True):
            line(axis, runs.tanhs(lr), name, f"lr {lr:g}", colour)
    axes[0].set_ylim(0, 1.02)
    logarithmic(axes[2])
    legend_above(figure, axes[0])
    return figure


FISHER: Final = {
    "position": "model/model.position",
    "decoder": "decoder/decoder.weight",
    "embedding": "embedding/embedding.weight",
    "in_proj": "layers.0.attention/layers.0.attention.in_proj_weight",
    "mlp.0": "layers.0.mlp.0/layers.0.mlp.0.weight",
}


def draw_fisher_information() -> Any:
    figure, (left, right) = panels(2, "mean by parameter", "parameters called dead")
    run, colours = runs.grokking(), iter(COLOURS)
    for label, name in FISHER.items():
        line(left, run, f"fisher_info/{name}/mean", label, next(colours), linewidth=1.1)
    mark(left, 1e-8, "1e-8")
    logarithmic(left)
    left.legend(fontsize=7.5, loc="lower left", ncols=3)
    left.set_ylim(1e-11)
    line(right, run, "fisher_information/dead_fraction", "dead_fraction")
    right.plot(*_mean_of(run, "fisher_info/", "/dead"), color=GREY, linewidth=1.1, label="under 1e-8")
    line(right, run, "training_metrics/val_acc", "accuracy", ORANGE, linewidth=1.1)
    right.set_ylim(-0.02, 1.02)
    right.legend(loc="center left")
    return figure


def _mean_of(run: Run, prefix: str, suffix: str = "") -> tuple[list[int], list[float]]:
    """The mean over several metrics, which have come at the same times."""
    series = [run[name] for name in run.names(prefix, suffix)]
    return series[0][0], [sum(values) / len(values) for values in zip(*(one[1] for one in series), strict=True)]
