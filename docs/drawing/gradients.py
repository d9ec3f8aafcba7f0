"""Pictures of the analyses that look at gradients of epochs and steps."""

from __future__ import annotations

from typing import Any

from drawing import runs
from drawing.canvas import (
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    STRATEGIES,
    legend_above,
    line,
    logarithmic,
    mark,
    panels,
    turning_points,
)
from drawing.runs import Run


def draw_training_metrics() -> Any:
    figure, (left, right) = panels(2, "loss", "accuracy")
    run = runs.grokking()
    line(left, run, "training_metrics/loss", "training pairs")
    line(left, run, "training_metrics/val_loss", "other pairs", ORANGE)
    logarithmic(left)
    line(right, run, "training_metrics/train_acc", "training pairs")
    line(right, run, "training_metrics/val_acc", "other pairs", ORANGE)
    left.legend()
    right.legend()
    return figure


def draw_norms() -> Any:
    figure, axis = panels(1)
    run = runs.grokking()
    line(axis, run, "norms/total_norm", "total_norm", "#111111", linewidth=2)
    for name, colour in zip(("decoder.weight", "embedding.weight", "layers.0.mlp.0.weight"), COLOURS, strict=False):
        line(axis, run, f"norms/norm_{name}", name, colour, linewidth=1.1)
    logarithmic(axis)
    axis.set_ylabel("length of the mean gradient")
    axis.set_ylim(3e-4)
    turning_points(axis, text="bottom")
    legend_above(figure, axis)
    return figure


def draw_consecutive() -> Any:
    figure, axis = panels(1)
    for strategy, colour in STRATEGIES.items():
        line(axis, runs.ordered(strategy), "consecutive/angle_degrees", strategy, colour)
    mark(axis, 90, "unrelated")
    axis.set_ylabel("angle_degrees")
    axis.set_ylim(0, 180)
    axis.set_yticks((0, 45, 90, 135, 180))
    legend_above(figure, axis, "order: ")
    return figure


def draw_variance() -> Any:
    figure, (left, right) = panels(2, "mean_pairwise_cos", "signal_to_noise")
    for strategy, colour in STRATEGIES.items():
        line(left, runs.ordered(strategy), "variance/mean_pairwise_cos", strategy, colour)
        line(right, runs.ordered(strategy), "variance/signal_to_noise", strategy, colour)
    mark(left, 0, "")
    mark(right, 1, "signal = noise")
    legend_above(figure, left, "order: ")
    return figure


def draw_batch_dynamics() -> Any:
    figure, (left, right) = panels(2, "lag_k, epochs 20 to 29", "efficiency_k, epochs 20 to 29")
    windows = (2, 5, 10, 20, 50)
    for strategy, colour in STRATEGIES.items():
        run = runs.ordered(strategy)
        left.plot(range(1, 31), [_between(run, f"batch_dynamics/lag_{lag}") for lag in range(1, 31)], color=colour)
        sums = [_between(run, f"batch_dynamics/efficiency_{size}") for size in windows]
        right.plot(windows, sums, color=colour, marker="o", markersize=3, label=strategy)
    left.axhline(0, color=GREY, linewidth=0.8)
    right.plot(windows, [size**-0.5 for size in windows], color=GREY, linestyle="--", linewidth=1, label="random walk")
    left.set_xlabel("steps apart; an epoch is 9")
    left.set_xticks(range(0, 31, 9))
    right.set_xlabel("steps added up")
    right.set_xscale("log")
    logarithmic(right)
    right.set_xticks(windows, windows)
    right.minorticks_off()
    right.set_yticks((0.1, 0.2, 0.4, 0.8), ("0.1", "0.2", "0.4", "0.8"))
    right.legend()
    return figure


def _between(run: Run, name: str, first: int = 20, last: int = 29) -> float:
    values = [value for epoch, value in zip(*run[name], strict=True) if first <= epoch <= last]
    return float(sum(values) / len(values))


def draw_subspace_gradient_info() -> Any:
    figure, axis = panels(1)
    run = runs.grokking()
    line(axis, run, "subspace_gradient_info/dims_for_90pct", "dims_for_90pct")
    line(axis, run, "subspace_gradient_info/participation_ratio", "participation_ratio", ORANGE)
    axis.plot([1, 49, 99], [1, 49, 49], color=GREY, linestyle="--", linewidth=1, label="most that a window can have")
    axis.set_ylabel("directions")
    axis.set_ylim(0, 32)
    turning_points(axis)
    axis.legend(loc="upper right")
    return figure


def draw_gradient_projection() -> Any:
    figure, (left, right) = panels(2, "cosine with the way to the last weights", "distance_to_reference")
    run = runs.grokking()
    line(left, run, "gradient_projection/overall_disp_cossim_to_solution", "move of an epoch")
    line(left, run, "gradient_projection/overall_grad_cossim_to_solution", "descent of its gradient", ORANGE)
    left.axhline(0, color=GREY, linewidth=0.8)
    line(right, run, "gradient_projection/distance_to_reference")
    right.set_ylim(0)
    turning_points(left, text="")
    turning_points(right)
    left.legend()
    return figure


def draw_token_gradient() -> Any:
    figure, (left, right) = panels(2, "gradient_gini", "tokens_for_50pct, of 64")
    for skew, label, colour in ((0.0, "all tokens alike", BLUE), (1.0, "Zipf: the k-th as 1/k", ORANGE)):
        run = runs.next_tokens(skew)
        line(left, run, "token_gradient/gradient_gini", label, colour)
        line(right, run, "token_gradient/tokens_for_50pct", label, colour)
    left.set_ylim(0, 0.7)
    right.set_ylim(0, 36)
    mark(right, 32, "even")
    left.legend()
    return figure
