"""``adam_dynamics``, against states set by hand and steps that torch has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers_analyses import cos
from torch import nn

import hookline as hl
from hookline.analyses.interventions import AdamDynamicsHook

POINT = hl.HookPoint.POST_STEP


def fire(model: nn.Module, optimizer: Any, reference: Any = None, **context: Any) -> dict[str, float]:
    """One firing, outside of any loop."""
    hook = AdamDynamicsHook(every_n_steps=1, burst_length=1)
    manager = hl.HookManager(hooks=[hook], reference_weights=reference, loop_type="step")
    for _ in range(2):
        manager.advance_step()
    found = manager.fire(
        POINT, hl.RunDataContext(POINT, 0, step=1, model=model, **context), hl.ModelDataContext(model, optimizer)
    )
    return {key.removeprefix("adam_dynamics/"): float(value) for key, value in found.items()}


class Two(nn.Module):
    """Two weights and a bias, which does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.tensor([[1.0, 2.0]]))
        self.a = nn.Parameter(torch.tensor([3.0]))
        self.bias = nn.Parameter(torch.tensor([7.0]))


def by_hand(optimizer_class: Any = torch.optim.Adam, **options: Any) -> tuple[Two, Any]:
    """A model whose Adam is at step 3, with moments and gradients that one can follow."""
    model = Two()
    optimizer = optimizer_class(model.parameters(), **({"lr": 0.1, "betas": (0.5, 0.75), "eps": 0.5} | options))
    first = {"b": [[0.7, -1.4]], "a": [2.1], "bias": [9.0]}
    second = {"b": [[1.0, 4.0]], "a": [0.25], "bias": [9.0]}
    grads = {"b": [[1.0, 1.0]], "a": [2.0], "bias": [9.0]}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.tensor(grads[name])
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.tensor(first[name]),
            "exp_avg_sq": torch.tensor(second[name]),
        }
    return model, optimizer


M = np.array([2.1, 0.7, -1.4])  # sorted by name: a, then b
G = np.array([2.0, 1.0, 1.0])
M_HAT = M / (1 - 0.5**3)
RATES = 0.1 / (np.sqrt(np.array([0.25, 1.0, 4.0]) / (1 - 0.75**3)) + 0.5)
UPDATE = RATES * M_HAT


def test_figures_by_hand():
    along = (UPDATE @ G) / (G @ G) * G
    assert fire(*by_hand()) == pytest.approx(
        {
            "momentum_grad_cossim": cos(M, G),
            "amplification_ratio": np.linalg.norm(UPDATE) / np.linalg.norm(0.1 * G),
            "update_deflection": np.linalg.norm(UPDATE - along) / np.linalg.norm(UPDATE),
            "effective_lr_cv": RATES.std(ddof=1) / RATES.mean(),
        },
        rel=1e-5,
    )


def test_all_probe_and_solution_figures_appear():
    """OrderedLearning computed those of the probe, and lost them."""
    model, optimizer = by_hand()
    reference = {"a": torch.tensor([4.0]), "b": torch.tensor([[0.0, 2.0]]), "bias": torch.tensor([1.0])}
    target = {"a": torch.tensor([1.0]), "b": torch.tensor([[0.5, -1.0]]), "bias": torch.tensor([5.0])}
    found = fire(model, optimizer, reference, target_grad=target)
    way, probe = np.array([1.0, -1.0, 0.0]), np.array([1.0, 0.5, -1.0])
    for prefix, aim in (("solution", way), ("probe", probe)):
        assert found[f"momentum_{prefix}_cossim"] == pytest.approx(cos(M, aim), rel=1e-5, abs=1e-6)
        assert found[f"update_{prefix}_cossim"] == pytest.approx(cos(UPDATE, aim), rel=1e-5, abs=1e-6)
        assert found[f"grad_{prefix}_cossim"] == pytest.approx(cos(G, aim), rel=1e-5, abs=1e-6)
        assert found[f"optimizer_{prefix}_amplification"] == pytest.approx(
            cos(UPDATE, aim) - cos(G, aim), rel=1e-5, abs=1e-6
        )
    hook = AdamDynamicsHook()
    assert found.keys() == {info.name for info in hook.describe_metrics()}


def test_each_group_has_its_own_rate():
    model = Two()
    groups = [{"params": [model.a], "lr": 0.5}, {"params": [model.b, model.bias], "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, eps=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the first step of Adam is the rate, whatever the gradient
    found = fire(model, optimizer)
    rates = np.array([0.5, 0.1, 0.1])
    assert found["amplification_ratio"] == pytest.approx(1.0, rel=1e-5)
    assert found["effective_lr_cv"] == pytest.approx(rates.std(ddof=1) / rates.mean(), rel=1e-4)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"foreach": True},
        {"fused": True},
        {"amsgrad": True},
        {"amsgrad": True, "fused": True},
        {"maximize": True},
        {"lr": torch.tensor(0.03)},
    ],
    ids=str,
)
def test_the_update_is_the_one_that_torch_makes(optimizer_class, options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    optimizer = optimizer_class(model.parameters(), **({"lr": 0.03, "weight_decay": 0.0} | options))
    for scale in (3.0, 1.0, 0.2):  # so that the largest second moment is not the last
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        optimizer.zero_grad()
        (scale * model(torch.randn(8, 3)).square().sum()).backward()
        optimizer.step()
    update = (before - torch.cat([p.detach().flatten() for p in model.parameters()])).numpy().astype(np.float64)
    grad = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().astype(np.float64)
    if options.get("maximize"):
        grad = -grad
    unit = grad / np.linalg.norm(grad)
    found = fire(model, optimizer)
    assert found["amplification_ratio"] == pytest.approx(np.linalg.norm(update) / np.linalg.norm(0.03 * grad), rel=1e-4)
    assert found["update_deflection"] == pytest.approx(
        np.linalg.norm(update - (update @ unit) * unit) / np.linalg.norm(update), rel=1e-3
    )
    assert found["momentum_grad_cossim"] > -1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
        lambda p: torch.optim.RAdam(p, lr=0.1),
    ],
)
def test_other_optimizers_say_nothing_and_raise_nothing(make):
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert fire(model, optimizer) == {}
