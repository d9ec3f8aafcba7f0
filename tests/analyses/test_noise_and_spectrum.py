"""``gradient_noise_scale`` on gradients of known noise, ``hessian_spectrum`` on losses of known curvature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers_analyses import context
from torch import nn

import hookline as hl
from hookline.analyses import GradientNoiseScaleHook, HessianSpectrumHook

POST_STEP, POST_EPOCH = hl.HookPoint.POST_STEP, hl.HookPoint.POST_EPOCH


# -- noise scale ---------------------------------------------------------------------------------------------


def shown(hook, gradients, batch=None):
    model = nn.Linear(gradients.shape[1], 1, bias=False)
    for gradient in gradients:
        model.weight.grad = torch.as_tensor(gradient, dtype=torch.float32).view(1, -1)
        assert hook.compute(context(model, POST_STEP, batch_data=batch)) is None
    return hook.compute(context(model, POST_EPOCH))


def test_noise_scale_is_the_formula():
    """Said again in numpy, over groups of four steps; two steps that are left over wait for the next report."""
    draw = np.random.default_rng(0)
    gradients = 1.0 + draw.normal(size=(14, 30))
    found = shown(GradientNoiseScaleHook(steps=4), gradients, batch=(torch.zeros(16, 3), torch.zeros(16)))
    groups = gradients[:12].reshape(3, 4, 30)
    small = (groups**2).sum(-1).mean()
    big = (groups.mean(1) ** 2).sum(-1).mean()
    signal = (64 * big - 16 * small) / (64 - 16)
    noise = (small - big) / (1 / 16 - 1 / 64)
    assert found["signal"] == pytest.approx(signal, rel=1e-5)
    assert found["noise"] == pytest.approx(noise, rel=1e-5)
    assert found["noise_scale"] == pytest.approx(noise / signal, rel=1e-5)
    assert found["batch_fraction"] == pytest.approx(16 * signal / noise, rel=1e-5)


def test_noise_scale_finds_the_noise_that_was_put_in():
    """Samples of variance 4 in each of 50 directions, a gradient of length √50: the scale is 4, whatever the batch."""
    for batch in (8, 32):
        draw = np.random.default_rng(1)
        gradients = 1.0 + draw.normal(size=(4000, 50)) * 2 / math.sqrt(batch)
        found = shown(GradientNoiseScaleHook(batch_size=batch), gradients)
        assert found["noise_scale"] == pytest.approx(4.0, rel=0.05)
        assert found["signal"] == pytest.approx(50.0, rel=0.02)


# -- spectrum ------------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """½ xᵀAx, whose Hessian is A."""

    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.x = nn.Parameter(torch.ones(matrix.shape[0]))

    def forward(self):
        return 0.5 * self.x @ self.matrix @ self.x


def looked_at(model, hook, loss=lambda model, batch: model(), batch=0):
    model_ctx = hl.ModelDataContext(model, loss_fn=loss, batch=batch)
    ctx = hl.RunDataContext(POST_STEP, 0, step=3, model=model, lr=0.1)
    return hook.intervene(ctx, model_ctx)


def symmetric(values, seed=0):
    draw = np.random.default_rng(seed)
    basis = np.linalg.qr(draw.normal(size=(len(values), len(values))))[0]
    return torch.as_tensor(basis @ np.diag(values) @ basis.T, dtype=torch.float32)


def test_spectrum_of_a_quadratic():
    """Largest, smallest, the error bound and the trace, of a matrix that was made of its eigenvalues."""
    values = [7.0, 5.0, 4.0, *np.linspace(1, -0.5, 56), -2.0]
    found = looked_at(Quadratic(symmetric(values)), HessianSpectrumHook(iterations=30, probes=64))
    assert [found[f"eigenvalue_{k}"] for k in (1, 2, 3)] == pytest.approx([7, 5, 4], rel=1e-3)
    assert found["top_eigenvalue"] == found["eigenvalue_1"]
    assert found["smallest_eigenvalue"] == pytest.approx(-2, rel=1e-3)
    assert found["lr_times_sharpness"] == pytest.approx(0.7, rel=1e-3)
    assert found["top_eigenvalue_error"] < 1e-3
    assert abs(found["trace"] - sum(values)) < 4 * found["trace_error"] < 8


def test_too_few_iterations_show_in_the_error():
    """The bound holds: there is an eigenvalue that near."""
    values = np.linspace(1, 10, 80)
    found = looked_at(Quadratic(symmetric(values)), HessianSpectrumHook(iterations=4, probes=0))
    nearest = np.abs(values - found["top_eigenvalue"]).min()
    assert nearest <= found["top_eigenvalue_error"] + 1e-4
    assert found["top_eigenvalue_error"] > 0.01
    assert "trace" not in found


def test_spectrum_of_a_network_is_that_of_its_hessian():
    """Against the whole matrix, by differentiating twice in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(10, 3).double()
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()], strict=True)

    def loss(flat):
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        weights = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    right = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat)).flip(0)
    hook = HessianSpectrumHook(iterations=21, probes=0)
    found = looked_at(model, hook, lambda model, batch: model(batch).square().mean(), x)
    assert [found[f"eigenvalue_{k}"] for k in (1, 2, 3)] == pytest.approx(right[:3].tolist(), rel=1e-6)
    assert found["smallest_eigenvalue"] == pytest.approx(float(right[-1]), rel=1e-6)
