"""Input on which rounding, other makes of layers or half precision would make a figure wrong without a sign of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers_analyses import context, singular_values
from torch import nn

import hookline as hl
from hookline.analyses import (
    AttentionHook,
    ConsecutiveHook,
    HessianHook,
    SubspaceGradientInfoHook,
    VarianceHook,
)


@pytest.mark.parametrize("share", [1e-3, 1e-4])
def test_gradients_that_hardly_differ_are_told_apart(share):
    """Centred figures are differences of products: in float32, the variance was 10 % off at 1e-3, nonsense below."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randn(40, 50, generator=draw)
    model = nn.Linear(50, 40, bias=False)
    hooks = VarianceHook(), SubspaceGradientInfoHook(), ConsecutiveHook()
    reference = model.weight.detach() + torch.randn(40, 50, generator=draw)
    hooks[1].set_reference_weights({"weight": reference})
    rows = []
    for _ in range(5):
        gradient = common + share * torch.randn(40, 50, generator=draw)
        rows.append(gradient.double().numpy().ravel())
        found = [hook.compute(context(model, accumulated_grads={"weight": gradient})) for hook in hooks]
    gradients = np.array(rows)
    centred = gradients - gradients.mean(0)
    assert found[0]["gradient_variance"] == pytest.approx((centred**2).mean(), rel=1e-4)
    std = np.linalg.norm(gradients.std(0, ddof=1))
    assert found[0]["signal_to_noise"] == pytest.approx(np.linalg.norm(gradients.mean(0)) / std, rel=1e-4)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    squares = sizes**2
    assert found[1]["svd_total_variance"] == pytest.approx(squares.sum(), rel=1e-4)
    assert found[1]["participation_ratio"] == pytest.approx(squares.sum() ** 2 / (squares**2).sum(), rel=1e-3)
    way = (reference - model.weight.detach()).double().numpy().ravel()
    energies = squares * (directions @ (way / np.linalg.norm(way))) ** 2
    share_of_way = found[1]["grad_energy_fraction_toward_solution"]
    assert share_of_way == pytest.approx(energies.sum() / squares.sum(), rel=1e-2)
    one, other = gradients[-1], gradients[-2]
    cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
    assert float(found[2]["angle_degrees"]) == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-4)


def test_the_largest_singular_values_of_a_large_matrix():
    """As flat as a spectrum gets: to 2 %, and never too large."""
    matrix = torch.rand(900, 600, generator=torch.Generator().manual_seed(0)) - 0.5
    right = np.linalg.svd(matrix.double().numpy(), compute_uv=False)[:20]
    found = singular_values(matrix)
    assert found.shape == (20,)
    assert np.abs(found / right - 1).max() < 0.02
    assert (found <= right * (1 + 1e-5)).all()


class Conv1D(nn.Module):
    """The linear layer of Hugging Face's GPT-2: the weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))


class Decoder(nn.Module):
    """Embedding, attention and an MLP as GPT-2 names them; the decoder is the embedding."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(23, 8)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(24, 8), "c_proj": Conv1D(8, 8)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(32, 8), "c_proj": Conv1D(8, 32)})
        self.lm_head = nn.Linear(8, 23, bias=False)
        self.lm_head.weight = self.wte.weight


def test_attention_of_gpt2_is_found():
    """Query, key and value lie side by side in c_attn."""
    torch.manual_seed(0)
    model = Decoder()
    found = AttentionHook().compute(context(model))
    thirds = np.split(model.attn["c_attn"].weight.detach().double().numpy(), 3, axis=1)
    spectra = [np.linalg.svd(third, compute_uv=False) for third in thirds]
    assert found["sv_concentration"] == pytest.approx(np.mean([s[0] / s.sum() for s in spectra]), rel=1e-5)


def test_hessian_of_half_precision_is_not_rounded_away():
    """A move of 1e-4 is nothing to a bfloat16 of 1: the difference was zero, whatever the curvature."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).bfloat16()
    data = [torch.randn(8, 4).bfloat16() for _ in range(6)]
    sink = hl.sinks.MemorySink()
    hook = HessianHook(every_n_steps=2, burst_length=2)
    experiment = hl.Experiment(
        model, torch.optim.SGD(model.parameters(), lr=0.01), data, lambda model, x: model(x).float().square().mean()
    )
    hl.epoch_loop(experiment, epochs=1, manager=hl.HookManager(hooks=[hook], sinks=[sink]))
    quotients = list(sink.latest["hessian/rayleigh_quotient"])
    assert quotients
    x = torch.stack(data).double()
    largest = max(float(torch.linalg.eigvalsh(2 * b.T @ b / 8)[-1]) for b in x)
    assert all(0 < quotient < 1.05 * largest for quotient in quotients)
