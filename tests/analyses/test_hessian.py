"""``hessian``, against a quadratic loss whose every figure numpy works out in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers_analyses import by_step, cos
from helpers_loops import rich_experiment
from torch import nn

import hookline as hl
from hookline.analyses.interventions import HessianHook

ETA = 0.05


class Quadratic(nn.Module):
    """½ xᵀAx, with x in two parameters, and a bias that nothing depends on but itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        x = torch.randn(6, dtype=torch.float64)
        self.head = nn.Parameter(x[:2].to(dtype))
        self.tail = nn.Parameter(x[2:].to(dtype))
        self.bias = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, matrix):
        x = torch.cat([self.head, self.tail])
        return 0.5 * x @ (matrix.to(x.dtype) @ x) + 0.5 * (self.bias**2).sum()


def matrices(count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    roots = torch.randn(count, 6, 6, generator=made, dtype=torch.float64)
    return [root + root.T for root in roots]


def run(hook: hl.TrainingHook, dtype: torch.dtype, steps: int = 12, *, loop: str = "epoch", **options: Any) -> Any:
    model = Quadratic(dtype)
    experiment = hl.Experiment(
        model, torch.optim.SGD(model.parameters(), lr=ETA), matrices(steps), lambda model, batch: model(batch)
    )
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=[hook], sinks=[sink], **options)
    if loop == "epoch":
        hl.epoch_loop(experiment, epochs=1, manager=manager)
    else:
        hl.step_loop(experiment, steps=steps, manager=manager, snapshot_every=5)
    return by_step(sink, "hessian")


def descent() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The matrices, and the weights before each step and after the last."""
    data = [matrix.numpy() for matrix in matrices(12)]
    torch.manual_seed(0)
    path = [torch.randn(6, dtype=torch.float64).numpy()]
    for matrix in data:
        path.append(path[-1] - ETA * matrix @ path[-1])
    return data, path


def expected(step: int, reference: np.ndarray | None = None) -> dict[str, float]:
    """By the formulas: the product at the weights before the last step, the gradient at those of this one."""
    data, path = descent()
    g_a, g_b = data[step - 1] @ path[step - 1], data[step] @ path[step]
    product = data[step] @ g_a
    bent = ETA * product
    content = g_b + bent
    found = {
        "entanglement_norm": np.linalg.norm(bent),
        "content_norm": np.linalg.norm(content),
        "observed_grad_norm": np.linalg.norm(g_b),
        "entanglement_energy_ratio": (bent @ bent) / (g_b @ g_b),
        "entanglement_content_cossim": cos(bent, content),
        "rayleigh_quotient": g_a @ product / (g_a @ g_a),
        "amplification_ratio": np.linalg.norm(product) / np.linalg.norm(g_a),
        "edge_of_stability": 2 * ETA * np.linalg.norm(product) / np.linalg.norm(g_a),
    }
    for name, part in (("head", slice(0, 2)), ("tail", slice(2, 6))):
        found[f"entanglement_norm/{name}"] = np.linalg.norm(bent[part])
        found[f"content_norm/{name}"] = np.linalg.norm(content[part])
        found[f"entanglement_energy_ratio/{name}"] = (bent[part] @ bent[part]) / (g_b[part] @ g_b[part])
        if reference is not None:
            way = (reference - path[step + 1])[part]  # seen from where the run is
            found[f"entanglement_cossim_to_solution/{name}"] = cos(-bent[part], way)
            found[f"content_cossim_to_solution/{name}"] = cos(-content[part], way)
    if reference is not None:
        found["entanglement_cossim_to_solution"] = cos(-bent, reference - path[step + 1])
        found["content_cossim_to_solution"] = cos(-content, reference - path[step + 1])
    return found


def coherence(step: int) -> float:
    data, path = descent()
    now, last = (data[n] @ data[n - 1] @ path[n - 1] for n in (step, step - 1))
    return cos(now, last)


@pytest.mark.parametrize(
    ("method", "dtype", "tolerance"),
    [
        ("difference", torch.float32, 1e-3),
        ("difference", torch.float64, 1e-7),
        ("exact", torch.float32, 1e-4),
        ("exact", torch.float64, 1e-9),
    ],
)
def test_every_figure_against_numpy(method, dtype, tolerance):
    found = run(
        HessianHook(every_n_steps=4, burst_length=3, method=method, epsilon=1e-2 if dtype is torch.float32 else 1e-4),
        dtype,
    )
    assert sorted(found) == [5, 6, 9, 10]
    for step, metrics in found.items():
        wanted = expected(step)
        if step in (6, 10):
            wanted["entanglement_coherence"] = coherence(step)
        assert metrics.keys() == wanted.keys()
        assert metrics == pytest.approx(wanted, rel=tolerance, abs=tolerance)


def test_the_gradient_observed_is_the_one_that_training_saw():
    """As it lies in ``.grad``: with its dropout, its clipping, its micro-batches."""
    experiment = rich_experiment(accumulate=2, clip_norm=0.5)
    seen = {}

    class Note(hl.TrainingHook):
        hook_points = frozenset({hl.HookPoint.POST_STEP})

        def compute(self, ctx):
            named = ctx.model.named_parameters()
            parts = [p.grad.double().flatten().numpy() for name, p in named if "bias" not in name]
            seen[ctx.step] = float(np.linalg.norm(np.concatenate(parts)))

    sink = hl.sinks.MemorySink()
    hooks = [Note(), HessianHook(every_n_steps=1, burst_length=1)]
    hl.epoch_loop(experiment, epochs=2, manager=hl.HookManager(hooks=hooks, sinks=[sink]))
    found = by_step(sink, "hessian")
    assert len(found) >= 4
    for step, metrics in found.items():
        assert metrics["observed_grad_norm"] == pytest.approx(seen[step], rel=1e-6)


class OnceOnly(torch.autograd.Function):
    """x², of which torch is told not to differentiate the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def _twice(model: nn.Module, start: dict[str, torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as it was at first, and its optimizer."""
    again = copy.deepcopy(model)
    again.load_state_dict(start)
    return again, torch.optim.SGD(again.parameters(), lr=1e-3)


def test_a_loss_without_second_derivatives_gets_the_difference_and_one_warning():
    """Another error is raised as it is."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(8)]
    sink, hook = hl.sinks.MemorySink(), HessianHook(every_n_steps=2, burst_length=2)
    experiment = hl.Experiment(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        batches,
        lambda model, x: OnceOnly.apply(model(x)).square().sum(),
    )
    with pytest.warns(hl.HooklineWarning, match="no second derivative") as told:
        hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    assert len(told) == 1
    found = by_step(sink, "hessian")
    twin = hl.sinks.MemorySink()
    exact = hl.Experiment(*_twice(model, start), batches, lambda model, x: model(x).square().square().sum())
    hl.epoch_loop(exact, epochs=1, manager=hl.HookManager(hooks=[HessianHook(2.0**-20, 2, 2)], sinks=[twin]))
    assert sorted(found) == list(range(3, 8))
    for step, metrics in by_step(twin, "hessian").items():
        assert found[step]["rayleigh_quotient"] == pytest.approx(metrics["rayleigh_quotient"], rel=1e-3)

    def fails(vector, batch=None):
        raise RuntimeError("out of memory")

    context = hl.ModelDataContext(model, loss_fn=experiment.loss_fn, batch=batches[0])
    context.hvp = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        HessianHook()._exactly(0, context, {})


def test_bursts_start_afresh():
    """OrderedLearning kept weights from one burst to the next, and compared across."""
    hook = HessianHook(every_n_steps=5, burst_length=3)
    found = run(hook, torch.float64)
    assert sorted(found) == [6, 7, 11]  # 5, 10 only look; 12 never comes
    assert ["entanglement_coherence" in found[step] for step in (6, 7, 11)] == [False, True, False]
    done = HessianHook(every_n_steps=8, burst_length=2)
    run(done, torch.float64)
    assert done.state_dict()["before"] == {}  # nothing is kept between bursts


def test_the_way_to_a_solution():
    reference = np.arange(6.0)
    weights = {"head": torch.from_numpy(reference[:2]), "tail": torch.from_numpy(reference[2:])}
    hook = HessianHook(every_n_steps=4, burst_length=2, method="exact")
    found = run(hook, torch.float64, reference_weights=weights)
    for step, metrics in found.items():
        assert metrics == pytest.approx(expected(step, reference), rel=1e-9)


def with_dropout(method: str) -> dict[str, float]:
    experiment = rich_experiment(evaluate=None)
    experiment.model.double()
    experiment.loader = [(x.double(), y) for x, y in experiment.loader]
    experiment.model[2] = nn.Tanh()  # has a curvature to speak of
    sink = hl.sinks.MemorySink()
    hook = HessianHook(every_n_steps=3, burst_length=2, method=method, epsilon=1e-5)
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    return by_step(sink, "hessian")[4]


def test_dropout_does_not_count_as_curvature():
    """Both gradients are taken with the same mask."""
    assert with_dropout("difference") == pytest.approx(with_dropout("exact"), rel=1e-3, abs=1e-6)
