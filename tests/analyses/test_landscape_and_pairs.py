"""``loss_landscape`` along lines of a quadratic, ``paired_step`` against steps made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.analyses import LossLandscapeHook, PairedStepHook


class Bowl(nn.Module):
    """Σ aᵢ xᵢ², with one parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
        self.still = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, a):
        return (a * self.x**2).sum()


def parts(optimizer=None):
    model, a = Bowl(), torch.tensor([1.0, 2.0, 3.0])
    made = optimizer(model.parameters()) if optimizer else None
    model(a).backward()
    ctx = hl.RunDataContext(hl.HookPoint.POST_STEP, 0, step=5, model=model, lr=0.1)
    return model, ctx, hl.ModelDataContext(model, made, loss_fn=lambda model, batch: model(batch), batch=a)


def test_landscape_is_the_loss_along_the_gradient():
    """At each place by numpy; downhill is to the right."""
    _, ctx, model_ctx = parts()
    found = LossLandscapeHook(points=5, radius=0.5).intervene(ctx, model_ctx)
    x, a = np.array([1.0, -2.0, 0.5]), np.array([1.0, 2.0, 3.0])
    gradient = 2 * a * x
    line = -gradient / np.linalg.norm(gradient) * np.linalg.norm(x)
    places = np.linspace(-0.5, 0.5, 5)
    right = [float((a * (x + place * line) ** 2).sum()) for place in places]
    assert found["losses"] == pytest.approx(right, rel=1e-5)
    assert found["loss"] == pytest.approx(right[2], rel=1e-6)
    assert found["lowest"] == min(found["losses"]) < found["loss"]
    assert found["lowest_at"] == places[int(np.argmin(right))] > 0
    assert found["curvature"] == pytest.approx(float(2 * (a * line**2).sum()), rel=1e-3)


def test_a_random_line_is_as_long_as_each_parameter_and_the_same_for_a_step():
    """Twice the same at one step, another at the next."""
    model, ctx, model_ctx = parts()
    hook = LossLandscapeHook(points=3, radius=0.1, direction="random")
    line = hook._line(5, model_ctx, {"x": model.x})
    assert float(line["x"].norm()) == pytest.approx(float(model.x.detach().norm()))
    one = hook.intervene(ctx, model_ctx)
    with torch.no_grad():
        model.x.copy_(torch.tensor([1.0, -2.0, 0.5]))  # a guard would do that
    assert hook.intervene(ctx, model_ctx)["losses"] == one["losses"]
    assert not torch.equal(hook._line(6, model_ctx, {"x": model.x})["x"], line["x"])


def test_a_pair_of_steps_is_two_steps_by_hand():
    """SGD with momentum, that has moved before: the plain step, and one of three times the rate."""
    model, ctx, model_ctx = parts(lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.05, momentum=0.9))
    optimizer, a = model_ctx._optimizer, torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    x = model.x.detach().double().numpy().copy()
    momentum = optimizer.state[model.x]["momentum_buffer"].double().numpy().copy()
    weights = a.double().numpy()
    found = PairedStepHook(lr_factor=3.0).intervene(ctx, model_ctx)
    move = -0.05 * (0.9 * momentum + 2 * weights * x)
    plain, changed = ((weights * (x + k * move) ** 2).sum() for k in (1, 3))
    assert float(found["loss_before"]) == pytest.approx((weights * x**2).sum(), rel=1e-5)
    assert float(found["loss_plain"]) == pytest.approx(plain, rel=1e-5)
    assert float(found["loss_changed"]) == pytest.approx(changed, rel=1e-5)
    assert float(found["loss_difference"]) == pytest.approx(changed - plain, rel=1e-4)
    assert float(found["step_length_ratio"]) == pytest.approx(3.0, rel=1e-4)
    assert float(found["step_cosine"]) == pytest.approx(1.0, rel=1e-5)


def test_a_change_of_ones_own():
    """Without dropout, say; here, nothing: then both steps are one."""

    class Nothing(PairedStepHook):
        name = "nothing"

        def change(self, model_ctx):
            pass

    _, ctx, model_ctx = parts(lambda p: torch.optim.Adam([q for q in p if q.requires_grad], lr=0.05))
    found = Nothing().intervene(ctx, model_ctx)
    assert float(found["loss_difference"]) == 0.0
    assert float(found["loss_plain"]) != float(found["loss_before"])
