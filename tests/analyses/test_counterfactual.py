"""``counterfactual`` and its validator, against epochs that numpy trains again in the orders that the hook drew."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from helpers_analyses import by_epoch, cos
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.analyses.interventions import CounterfactualHook, CounterfactualValidatorHook
from hookline.phases import phase

NUM_ROWS, BATCH, RATE = 12, 3, 0.05


class Regression:
    """Linear regression in float64 whose batches say which rows they are: everything can be trained again by hand."""

    def __init__(self, **options: Any) -> None:
        made = torch.Generator().manual_seed(4)
        self.x = torch.randn(NUM_ROWS, 3, generator=made, dtype=torch.float64)
        self.y = torch.randn(NUM_ROWS, 2, generator=made, dtype=torch.float64)
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).double()
        self.start = (self.model.weight.detach().numpy().copy(), self.model.bias.detach().numpy().copy())
        self.orders: list[tuple[str, list[int]]] = []
        loader = DataLoader(TensorDataset(self.x, self.y, torch.arange(NUM_ROWS)), batch_size=BATCH)
        self.experiment = hl.Experiment(
            self.model, torch.optim.SGD(self.model.parameters(), lr=RATE), loader, self.loss, **options
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, rows = batch
        self.orders.append((phase(), rows.tolist()))
        return (model(x) - y).square().mean()

    def epochs_of_hook(self) -> list[list[list[int]]]:
        """The rows of every batch that was trained in an intervention, epoch by epoch."""
        batches = [rows for when, rows in self.orders if when == "intervention"]
        size = NUM_ROWS // BATCH
        return [batches[i : i + size] for i in range(0, len(batches), size)]

    def train(self, start: Any, order: list[list[int]]) -> tuple[Any, np.ndarray]:
        """The weights after an epoch and its mean gradient (bias, then weight: sorted by name), by numpy."""
        weight, bias = start[0].copy(), start[1].copy()
        x, y = self.x.numpy(), self.y.numpy()
        total = []
        for rows in order:
            error = 2 * (x[rows] @ weight.T + bias - y[rows]) / (len(rows) * 2)
            gradients = error.T @ x[rows], error.sum(0)
            total.append(np.concatenate([gradients[1].ravel(), gradients[0].ravel()]))
            weight -= RATE * gradients[0]
            bias -= RATE * gradients[1]
        return (weight, bias), np.mean(total, 0)


IN_ORDER = [list(range(i, i + BATCH)) for i in range(0, NUM_ROWS, BATCH)]
BIAS, WEIGHT = slice(0, 2), slice(2, 8)


def run(hook: hl.TrainingHook, epochs: int = 1, **options: Any) -> tuple[Regression, dict[int, dict[str, float]]]:
    made = Regression()
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[hook], sinks=[sink], **options)
    hl.epoch_loop(made.experiment, epochs=epochs, manager=manager)
    return made, by_epoch(sink, hook.name)


def split(g: np.ndarray, cf: np.ndarray) -> dict[str, float]:
    content = (g @ cf) / (cf @ cf) * cf
    ordering = g - content
    return {
        "content_component_norm": np.linalg.norm(content),
        "ordering_component_norm": np.linalg.norm(ordering),
        "ordering_fraction": (ordering @ ordering) / (g @ g),
        "ordering_alignment": cos(g, cf),
    }


@pytest.mark.parametrize("k", [1, 3])
def test_every_figure_against_numpy(k):
    made, found = run(CounterfactualHook(k=k))
    orders = made.epochs_of_hook()
    assert len(orders) == k
    _, g = made.train(made.start, IN_ORDER)
    cf = np.mean([made.train(made.start, order)[1] for order in orders], 0)
    wanted = {"counterfactual_mean_norm": np.linalg.norm(cf), **split(g, cf)}
    wanted |= {f"{name}/weight": value for name, value in split(g[WEIGHT], cf[WEIGHT]).items()}
    assert found[0] == pytest.approx(wanted, rel=1e-9)


def test_the_same_order_leaves_nothing_to_ordering():
    """The control of the split: an epoch in the run's own order is all content."""
    hook = CounterfactualHook(k=1)
    made = Regression(shuffled_loader=lambda generator: made.experiment.loader)
    sink = hl.sinks.MemorySink()
    hl.epoch_loop(made.experiment, epochs=1, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    assert by_epoch(sink, "counterfactual")[0]["ordering_fraction"] == pytest.approx(0.0, abs=1e-12)
    _, shuffled = run(CounterfactualHook(k=1))
    assert shuffled[0]["ordering_fraction"] > 1e-6


def test_shuffles_differ_from_each_other_and_from_one_firing_to_the_next():
    """In OrderedLearning, going back to before the epoch put the random stream back too: k times the same order."""
    made, _ = run(CounterfactualHook(k=4), epochs=3)
    orders = [tuple(row for batch in epoch for row in batch) for epoch in made.epochs_of_hook()]
    assert len(orders) == 12
    assert len(set(orders)) == 12
    assert all(sorted(order) == list(range(NUM_ROWS)) for order in orders)


def test_the_way_to_a_solution_and_past_energies():
    reference = {"weight": torch.ones(2, 3, dtype=torch.float64), "bias": torch.full((2,), -1.0, dtype=torch.float64)}
    made, found = run(CounterfactualHook(k=2, window_size=2), epochs=4, reference_weights=reference)
    orders = made.epochs_of_hook()
    goal = np.concatenate([np.full(2, -1.0), np.ones(6)])
    start, windows = made.start, {"content": [], "ordering": []}
    for epoch in range(4):
        after, g = made.train(start, IN_ORDER)
        cf = np.mean([made.train(start, order)[1] for order in orders[2 * epoch : 2 * epoch + 2]], 0)
        way = goal - np.concatenate([start[1].ravel(), start[0].ravel()])
        content = (g @ cf) / (cf @ cf) * cf
        parts = {"content": -content, "ordering": content - g, "cf": -cf}
        for part, vector in parts.items():
            assert found[epoch][f"{part}_grad_cossim_to_solution"] == pytest.approx(cos(vector, way), rel=1e-8)
            assert found[epoch][f"{part}_grad_cossim_to_solution/weight"] == pytest.approx(
                cos(vector[WEIGHT], way[WEIGHT]), rel=1e-8
            )
        for part, window in windows.items():
            window.append(parts[part])
            del window[:-2]
            name = f"{part}_energy_fraction_toward_solution"
            assert (name in found[epoch]) == (epoch > 0)
            if epoch > 0:
                # As OrderedLearning has it: singular vectors weighted by energy.
                _, sigma, directions = np.linalg.svd(np.stack(window), full_matrices=False)
                share = (sigma**2 * (directions @ (way / np.linalg.norm(way))) ** 2).sum() / (sigma**2).sum()
                assert found[epoch][name] == pytest.approx(share, rel=1e-8)
        start = after
    assert "content_grad_cossim_to_solution/bias" not in found[0]


@pytest.mark.parametrize("k", [1, 3])
def test_the_validator_against_numpy(k):
    reference = {"weight": torch.ones(2, 3, dtype=torch.float64), "elsewhere": torch.ones(2)}
    made, found = run(CounterfactualValidatorHook(k=k), reference_weights=reference)
    orders = made.epochs_of_hook()
    assert len(orders) == k + 1
    rows = [made.train(made.start, order)[1][WEIGHT] for order in orders]
    means = [np.mean(chosen, 0) for chosen in combinations(rows, k)]
    everything = np.mean(rows, 0)
    lengths = [np.linalg.norm(mean) for mean in means]
    way = 1.0 - made.start[0].ravel()
    aims = [cos(-mean, way) for mean in means]
    whole = np.linalg.norm(everything)
    assert found[0] == pytest.approx(
        {
            "kp1_content_norm": whole,
            "k_content_norm_max": max(lengths),
            "k_content_norm_min": min(lengths),
            "k_content_norm_mean": np.mean(lengths),
            "kp1_norm_strictly_lower": float(whole < min(lengths)),
            "norm_convergence_gap": (np.mean(lengths) - whole) / whole,
            "k_to_kp1_cossim_mean": np.mean([cos(mean, everything) for mean in means]),
            "k_to_kp1_cossim_min": min(cos(mean, everything) for mean in means),
            "kp1_cossim_to_solution": cos(-everything, way),
            "k_cossim_to_solution_mean": np.mean(aims),
            "k_cossim_to_solution_std": np.std(aims),
            "k_cossim_to_solution_spread": max(aims) - min(aims),
        },
        rel=1e-8,
        abs=1e-12,
    )
