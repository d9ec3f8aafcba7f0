"""The trackers of components as hooks over time: names, numbers against numpy, sums over layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_analyses import context
from torch import nn

import hookline as hl
from hookline.analyses import (
    FisherInformationHook,
    GradientFlowHook,
    ReLUActivationsHook,
    ReLUGradientFlowHook,
    SaturatedActivationsHook,
)
from hookline.errors import HooklineWarning, OptionError

ALL = {
    "relu_activations": ReLUActivationsHook,
    "saturated_activations": SaturatedActivationsHook,
    "fisher_information": FisherInformationHook,
    "gradient_flow": GradientFlowHook,
    "relu_gradient_flow": ReLUGradientFlowHook,
}


class Small(nn.Module):
    """Linear, ReLU, linear, tanh; what each gave is kept, with its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.relu = nn.Linear(4, 6), nn.ReLU()
        self.second, self.tanh = nn.Linear(6, 3), nn.Tanh()
        self.seen = []

    def forward(self, x):
        before = self.first(x)
        rectified = self.relu(before)
        after = self.second(rectified)
        self.seen.append((before, rectified, after, self.tanh(after)))
        for tensor in self.seen[-1]:
            if tensor.requires_grad:
                tensor.retain_grad()
        return self.seen[-1][-1]


def small_run(hooks, epochs=1, **options):
    torch.manual_seed(3)
    model = Small()
    model.seen.clear()
    with torch.no_grad():
        model.first.bias[2] = -100.0  # a unit that is never on
        model.second.weight.mul_(4)
    data = [torch.randn(5, 4) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sink = hl.sinks.MemorySink()
    manager = hl.HookManager(hooks=hooks, sinks=[sink], **options)
    experiment = hl.Experiment(
        model,
        optimizer,
        data,
        lambda model, x: model(x).square().mean(),
        evaluate=lambda model: {"e": model(data[0]).sum()},
    )
    hl.epoch_loop(experiment, epochs=epochs, manager=manager)
    trained = [seen for seen in model.seen if seen[0].grad is not None]  # an evaluation has none
    assert len(trained) == 4 * epochs < len(model.seen)
    return (
        model,
        sink.latest,
        [[x.detach().double().numpy() for x in seen] for seen in trained],
        [[x.grad.double().numpy() for x in seen] for seen in trained],
    )


def test_names_and_numbers_are_those_of_the_trackers():
    """Under the names of Metta, without a hook's name in front; evaluation does not count."""
    _, got, values, grads = small_run([kind() for kind in ALL.values()])
    on = np.concatenate([rectified for _, rectified, _, _ in values]) > 0
    for unit in range(6):
        assert got[f"activations/relu/relu/{unit}"] == pytest.approx(on.mean(0)[unit])
    assert got["relu_activations/active_fraction"] == pytest.approx(on.mean())
    dead = int((~on).all(0).sum())
    assert dead >= 1
    assert got["relu_activations/dead_units"] == dead
    assert got["relu_activations/dead_fraction"] == pytest.approx(dead / 6)

    far = np.abs(np.concatenate([tanh for *_, tanh in values])) > 0.95
    assert 0 < far.mean() < 1
    for unit in range(3):
        assert got[f"activations/tanh/saturated_fraction/tanh/{unit}"] == pytest.approx(far.mean(0)[unit])
    for place in ("activations/tanh/saturation", "activations/tanh/saturation/tanh"):
        assert got[f"{place}/total_neurons"] == far.size
        assert got[f"{place}/saturated_neurons"] == far.sum()
        assert got[f"{place}/fraction"] == pytest.approx(far.mean())
        assert got[f"{place}/active_fraction"] == pytest.approx(1 - far.mean())
    assert got["saturated_activations/fraction"] == pytest.approx(far.mean())

    passed = np.abs(np.concatenate([before for before, *_ in grads])) > 1e-8
    for unit in range(6):
        assert got[f"gradient_flow/relu/relu/{unit}"] == pytest.approx(passed.mean(0)[unit])
    assert got["relu_gradient_flow/passed_fraction"] == pytest.approx(passed.mean())
    assert got["relu_gradient_flow/blocked_units"] >= dead

    flows = {}
    for place, layer in ((0, "first"), (2, "second")):
        flow = np.zeros(grads[0][place].shape[1])
        for grad in grads:
            flow = 0.95 * flow + 0.05 * np.sqrt((grad[place] ** 2).mean(0))
        assert got[f"gradient_flow/{layer}/mean"] == pytest.approx(flow.mean(), rel=1e-5)
        assert got[f"gradient_flow/{layer}/blocked_fraction"] == pytest.approx((flow < 1e-8).mean())
        flows[layer] = flow
    assert got["gradient_flow/first/unit_0"] == pytest.approx(flows["first"][0], rel=1e-5)
    assert "gradient_flow/first/unit_2" not in got  # nothing gets there
    assert got["gradient_flow/smallest"] == pytest.approx(min(flow.mean() for flow in flows.values()), rel=1e-5)


def test_layers_are_found_or_named():
    """By their kind, by name; a model that has none of the kind is told once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    hook = ReLUActivationsHook()
    with pytest.warns(HooklineWarning, match=r"'relu_activations' looked for nn\.ReLU.*found none, so it stays silent"):
        hook.start(model)
    ctx = hl.RunDataContext(hl.HookPoint.POST_EPOCH, 0, model=model)
    assert hook.compute(ctx) is None
    named = ReLUActivationsHook(targets="1")
    named.start(model)
    model(torch.ones(3, 2))
    assert {key for key in named.compute(ctx) if "/" in key} == {"activations/relu/1/0", "activations/relu/1/1"}
    named.finish()
    hl.assert_no_hooks(model)
    with pytest.raises(OptionError, match="beta"):
        FisherInformationHook(beta=1.0)


def test_gradient_flow_leaves_out_the_projection_that_attention_never_calls():
    hook = GradientFlowHook()
    hook.start(nn.TransformerEncoderLayer(8, 2, 16))
    names = ("self_attn.out_proj", "linear1", "linear2")
    assert [hook.tracker.has_component(name) for name in names] == [False, True, True]
    hook.finish()


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
