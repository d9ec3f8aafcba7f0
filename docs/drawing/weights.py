"""Pictures of the analyses that look at weights and at the run as a whole."""

from __future__ import annotations

from typing import Any

from drawing import runs
from drawing.canvas import BLUE, COLOURS, GREY, ORANGE, STRATEGIES, line, logarithmic, mark, panels, turning_points


def draw_weight_tracking() -> Any:
    figure, (left, right) = panels(2, "effective_rank", "top_sv")
    run = runs.grokking()
    names = ("embedding", "layers.0.attention.in_proj", "layers.0.mlp.0", "decoder")
    for name, colour in zip(names, COLOURS, strict=False):
        separator = "_" if name.endswith("in_proj") else "."
        line(left, run, f"weight_tracking/effective_rank/{name}{separator}weight", name, colour)
        line(right, run, f"weight_tracking/top_sv/{name}{separator}weight", name, colour)
    left.set_ylim(25, 80)
    left.legend(loc="upper right")
    turning_points(right, text="")
    return figure


def draw_parameter_delta() -> Any:
    figure, (left, right) = panels(2, "relative_delta of an epoch", "param_norm")
    run = runs.grokking()
    line(left, run, "parameter_delta/relative_delta")
    logarithmic(left)
    left.set_yticks((0.005, 0.01, 0.02, 0.05, 0.1), ("0.5 %", "1 %", "2 %", "5 %", "10 %"))
    line(right, run, "parameter_delta/param_norm")
    right.set_ylim(0)
    turning_points(left, text="")
    turning_points(right, text="bottom")
    return figure


def draw_path_length() -> Any:
    figure, (left, right) = panels(2, "way and distance, random order", "path_efficiency")
    run = runs.grokking()
    line(left, run, "path_length/path_length", "path_length")
    line(left, run, "path_length/net_displacement", "net_displacement", ORANGE)
    for strategy, colour in STRATEGIES.items():
        line(right, runs.ordered(strategy), "path_length/path_efficiency", strategy, colour)
    right.set_ylim(0)
    left.legend()
    right.legend()
    return figure


def draw_training_diagnostics() -> Any:
    figure, (left, right) = panels(2, "length of the gradient over an epoch's steps", "loss_volatility")
    run = runs.grokking()
    line(left, run, "training_diagnostics/grad_norm_mean", "grad_norm_mean")
    line(left, run, "training_diagnostics/grad_norm_max", "grad_norm_max", ORANGE, linewidth=1.1)
    logarithmic(left)
    left.legend(loc="lower left")
    line(right, run, "training_diagnostics/loss_volatility")
    return figure


def draw_attention() -> Any:
    figure, (left, right) = panels(2, "attn_entropy", "attn_variance")
    run = runs.finder()
    line(left, run, "attention/attn_entropy")
    mark(left, 1, "spread evenly", above=False)
    loss = left.twinx()
    line(loss, run, "training_metrics/loss", colour=GREY, linewidth=1.1)
    loss.set_ylabel("loss", color=GREY)
    loss.set_ylim(0, 3.2)
    loss.grid(visible=False)
    line(right, run, "attention/attn_variance")
    left.set_ylim(0, 1.07)
    right.set_ylim(0)
    return figure


def draw_fourier() -> Any:
    figure, (left, right) = panels(2, "freq_powers of the embedding", "neuron_fourier_top1")
    run = runs.grokking()
    found: dict[int, list[tuple[int, float]]] = {}
    for epoch, powers in zip(*run["fourier/freq_powers"], strict=True):
        for frequency, power in powers.items():
            found.setdefault(int(frequency), []).append((epoch, power))
    for (frequency, points), colour in zip(sorted(found.items()), COLOURS, strict=False):
        left.plot(*zip(*points, strict=True), label=f"frequency {frequency}", color=colour)
    mark(left, 1 / 59, "even share", above=False)
    left.set_xlim(0, 100)
    left.set_ylim(0)
    left.legend()
    line(right, run, "fourier/neuron_fourier_top1", "neuron_fourier_top1")
    accuracy = run["training_metrics/val_acc"]
    right.plot(*accuracy, color=GREY, linewidth=1.1, label="accuracy on other pairs")
    right.legend()
    return figure


def draw_phases() -> Any:
    figure, (left, right) = panels(2, "phase_code", "embedding_change_normalized")
    run = runs.grokking()
    left.step(*run["phases/phase_code"], where="mid", color=BLUE)
    left.set_yticks(range(5), ("0 not yet", "1 early", "2 rapid", "3 refining", "4 done"))
    accuracy = left.twinx()
    line(accuracy, run, "training_metrics/val_acc", colour=GREY, linewidth=1.1)
    accuracy.set_ylabel("validation accuracy", color=GREY)
    accuracy.grid(visible=False)
    epochs, values = run["phases/embedding_change_normalized"]
    right.plot(epochs[1:], values[1:], color=BLUE)  # at the first there is nothing to compare with
    right.set_ylim(0)
    return figure
