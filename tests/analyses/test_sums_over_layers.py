"""What trackers sum up over all layers: each parameter once, and bounds that do not depend on the size of the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_analyses import context
from torch import nn

import hookline as hl
from hookline.analyses import FisherInformationHook, GradientFlowHook


def told(hook, model, batches, loss=lambda model, x: model(x).square().mean()):
    """What a hook says after one backward pass for each batch, and the gradients of each pass by parameter."""
    hook.start(model)
    passes = []
    for batch in batches:
        model.zero_grad()
        loss(model, batch).backward()
        passes.append({name: p.grad.double().numpy().copy() for name, p in model.named_parameters()})
    found = dict(hook.compute(context(model)))
    hook.finish()
    hl.assert_no_hooks(model)
    return found, passes


class Nested(nn.Module):
    """A parameter of its own, an attention (which has one beside its ``out_proj``), and a decoder tied to a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.position = nn.Parameter(torch.randn(3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8))
        self.decoder = nn.Linear(8, 7)
        self.decoder.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens) + self.position
        self.attended = self.attention(x, x, x, need_weights=False)[0]
        if self.attended.requires_grad:
            self.attended.retain_grad()
        return self.decoder(x + self.block(self.attended))


def nested():
    torch.manual_seed(0)
    return Nested(), [torch.randint(7, (4, 3)) for _ in range(3)]


def fisher_of(passes, beta=0.95):
    """By numpy, for each parameter."""
    found = {name: np.zeros_like(grad) for name, grad in passes[0].items()}
    for grads in passes:
        found = {name: beta * found[name] + (1 - beta) * grads[name] ** 2 for name in found}
    return found


OWN = {
    "fisher_info/model/model.position": "position",
    "fisher_info/attention/attention.in_proj_weight": "attention.in_proj_weight",
    "fisher_info/attention.out_proj/attention.out_proj.weight": "attention.out_proj.weight",
    "fisher_info/block.0/block.0.weight": "block.0.weight",
    "fisher_info/table/table.weight": "table.weight",
    "fisher_info/decoder/decoder.bias": "decoder.bias",
}


@pytest.mark.parametrize("targets", [None, "*"])
def test_fisher_information_has_every_parameter_once(targets):
    """Also those of layers that hold others, of the model itself, and a tied one under its first name."""
    model, batches = nested()
    found, passes = told(FisherInformationHook(targets=targets), model, batches)
    wanted = fisher_of(passes)
    traces = [name for name in found if name.endswith("/trace")]
    assert len(traces) == len(wanted)
    for key, name in OWN.items():
        assert found[f"{key}/mean"] == pytest.approx(wanted[name].mean(), rel=1e-5)
    assert found["trace"] == pytest.approx(sum(values.sum() for values in wanted.values()), rel=1e-5)
    assert found["max"] == pytest.approx(max(values.max() for values in wanted.values()), rel=1e-5)


def small_loss(scale):
    return lambda model, x: model(x).square().mean() * scale


def units(dead):
    """Two layers of ReLUs; of the first, this unit is never on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].bias[dead] = -100.0
        model[2].bias += 0.5
    return model, [torch.randn(16, 4) for _ in range(3)]


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_dead_and_blocked_do_not_depend_on_the_size_of_the_loss(scale):
    """A loss a billion times as small has the same sums, where the bound of 1e-8 calls everything dead."""
    model, batches = units(dead=3)
    fisher, _ = told(FisherInformationHook(), model, batches, small_loss(scale))
    assert fisher["dead_count"] == 0
    flow, _ = told(GradientFlowHook(), model, batches, small_loss(scale))
    assert flow["blocked_fraction"] == pytest.approx((1 / 6 + 0 + 0) / 3)
    if scale != 1.0:  # the control: by the tracker's own bound all are
        assert all(value == 1.0 for name, value in fisher.items() if name.endswith("/dead"))
        assert flow["0/blocked_fraction"] == flow["4/blocked_fraction"] == 1.0
