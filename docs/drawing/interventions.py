"""Pictures of the interventions."""

from __future__ import annotations

from typing import Any

from drawing import runs
from drawing.canvas import (
    BLUE,
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
        run = runs.full_batch(lr)
        line(left, run, "hessian/edge_of_stability", f"lr {lr:g}", colour)
        line(right, run, "hessian/entanglement_energy_ratio", f"lr {lr:g}", colour)
    for axis in (left, right):
        logarithmic(axis)
        mark(axis, 4, "limit of stability")
        axis.set_ylim(top=12)
    left.legend(loc="center right")
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
