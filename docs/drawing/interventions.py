"""Pictures of the interventions."""

from __future__ import annotations

from typing import Any

from drawing import runs
from drawing.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    RED,
    STRATEGIES,
    legend_above,
    line,
    logarithmic,
    mark,
    panels,
    turning_points,
)


def draw_hessian() -> Any:
    figure, (left, right) = panels(2, "edge_of_stability", "entanglement_energy_ratio", below="step")
    for lr, colour in ((0.05, BLUE), (0.1, GREEN), (0.2, RED)):
        run = runs.full_batch(lr, "hessian")
        line(left, run, "hessian/edge_of_stability", f"lr {lr:g}", colour)
        line(right, run, "hessian/entanglement_energy_ratio", f"lr {lr:g}", colour)
    for axis in (left, right):
        logarithmic(axis)
        mark(axis, 4, "limit of stability")
        axis.set_ylim(top=12)
    left.legend(loc="center right")
    return figure


def draw_hessian_spectrum() -> Any:
    figure, (left, right) = panels(2, "lr_times_sharpness", "the two ends, lr 0.2", below="step")
    for lr, colour in ((0.05, BLUE), (0.1, GREEN), (0.2, RED)):
        line(left, runs.full_batch(lr, "hessian_spectrum"), "hessian_spectrum/lr_times_sharpness", f"lr {lr:g}", colour)
    mark(left, 2, "stable below", above=False)
    left.set_ylim(0, 2.7)
    left.legend(loc="upper left", ncols=3)
    run = runs.full_batch(0.2, "hessian_spectrum")
    for name, colour in zip(
        ("eigenvalue_1", "eigenvalue_2", "eigenvalue_3", "smallest_eigenvalue"), COLOURS, strict=False
    ):
        line(right, run, f"hessian_spectrum/{name}", name, colour)
    right.set_ylim(-1, 17)
    right.legend(ncols=2, fontsize=8, loc="upper right")
    return figure


def draw_loss_landscape() -> Any:
    figure, (left, right) = panels(2, "losses along the gradient", "curvature", below="step")
    run = runs.digits("loss_landscape", every=20, points=41, radius=0.2)
    steps, losses = run["loss_landscape/losses"]
    for step, colour in ((20, RED), (100, ORANGE), (580, BLUE)):
        values = losses[steps.index(step)]
        left.plot([0.2 * (2 * i / 40 - 1) for i in range(41)], values, color=colour, label=f"after step {step}")
    left.axvline(0, color=GREY, linewidth=0.8)
    left.set_xlabel("a; downhill to the right")
    left.legend()
    line(right, run, "loss_landscape/curvature")
    right.set_ylim(0)
    return figure


def draw_paired_step() -> Any:
    figure, axis = panels(1, below="step")
    for factor, colour in ((0.5, GREY), (2.0, BLUE), (8.0, ORANGE)):
        run = runs.digits("paired_step", every=20, lr_factor=factor)
        steps, before = run["paired_step/loss_before"]
        change = [d / b for d, b in zip(run["paired_step/loss_difference"][1], before, strict=True)]
        axis.plot(steps, change, color=colour, label=f"lr_factor {factor:g}")
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_ylabel("loss_difference / loss_before")
    axis.legend(ncols=3)
    return figure


def draw_adam_dynamics() -> Any:
    figure, (left, right) = panels(2, "cosine with the validation gradient", "amplification_ratio")
    run = runs.adam()
    line(left, run, "adam_dynamics/grad_probe_cossim", "gradient", ORANGE)
    line(left, run, "adam_dynamics/update_probe_cossim", "Adam's step")
    left.axhline(0, color=GREY, linewidth=0.8)
    left.legend()
    line(right, run, "adam_dynamics/amplification_ratio")
    logarithmic(right)
    right.set_yticks((50, 100, 200, 500), ("50", "100", "200", "500"))
    right.set_ylim(20, 1500)
    turning_points(left, text="")
    turning_points(right)
    return figure


def draw_counterfactual() -> Any:
    figure, (left, right) = panels(2, "ordering_fraction", "ordering_alignment")
    for strategy, colour in {**STRATEGIES, "stride": RED}.items():
        line(left, runs.counterfactual(strategy), "counterfactual/ordering_fraction", strategy, colour)
        line(right, runs.counterfactual(strategy), "counterfactual/ordering_alignment", strategy, colour)
    left.set_ylim(0, 1.03)
    right.axhline(0, color=GREY, linewidth=0.8)
    for axis in (left, right):
        axis.set_xticks(range(0, 16, 5))
    legend_above(figure, left, "order: ")
    return figure


def draw_counterfactual_validator() -> Any:
    figure, (left, right) = panels(2, "k_to_kp1_cossim_mean", "norm_convergence_gap", below="k")
    counts = (1, 2, 3, 5, 8)
    for axis, name in ((left, "k_to_kp1_cossim_mean"), (right, "norm_convergence_gap")):
        found = [runs.validator(k)[f"counterfactual_validator/{name}"][1] for k in counts]
        for k, values in zip(counts, found, strict=True):
            axis.plot([k] * len(values), values, "o", color=GREY, alpha=0.4, markersize=4)
        axis.plot(counts, [sum(values) / len(values) for values in found], color=BLUE, marker="o", markersize=3)
        axis.set_xticks(counts)
    left.set_ylim(0.75, 1.005)
    right.set_ylim(0)
    return figure
