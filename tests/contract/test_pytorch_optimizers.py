"""PyTorch around the model: optimizers and registration.

Where torch has the same hook and is right, the same scenario runs with torch's own.
"""

from __future__ import annotations

import pytest
import torch
from helpers_models import logger
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

import hookline as hl

STEP_KINDS = ["step_pre", "step_post"]


OPTIMIZERS = {
    cls.__name__: cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}


def weights():
    return [nn.Parameter(torch.tensor([1.0, 2.0]))]


def with_gradients(optimizer, value=1.0):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, value)
    return optimizer


def sgd(lr=0.1, cls=SGD):
    return with_gradients(cls(weights(), lr=lr))


def weight_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


def by_torch(optimizer, hook, kind):
    return getattr(optimizer, f"register_{kind}_hook")(hook)


def by_hookline(optimizer, hook, kind):
    return hl.attach_optimizer(optimizer, hook, on=kind)


BOTH = pytest.mark.parametrize("put", [by_torch, by_hookline], ids=["torch", "hookline"])


def test_hooks_on_every_optimizer_run_around_its_own_as_torchs_do():
    """Before them ahead of the step, and after them behind it."""
    events = []

    class Noting(SGD):
        def step(self, closure=None):
            events.append("step")
            return super().step(closure)

    optimizer = sgd(cls=Noting)
    for kind in STEP_KINDS:
        hl.attach_optimizer(optimizer, logger(events, f"own {kind}"), on=kind)
        hl.attach_optimizer(optimizer, logger(events, f"own {kind} prepended"), on=kind, prepend=True)
    with (
        hl.attach_everywhere(logger(events, "every step_pre"), on="step_pre"),
        hl.attach_everywhere(logger(events, "every step_post"), on="step_post"),
    ):
        optimizer.step()
    assert events == [
        "every step_pre",
        "own step_pre prepended",
        "own step_pre",
        "step",
        "own step_post prepended",
        "own step_post",
        "every step_post",
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_fires_once_per_step_and_steps_as_without_hooks(name):
    """Pre and post once each, numbered, and the weights are those of the plain optimizer."""

    def run(hooked):
        torch.manual_seed(0)
        sparse = name == "SparseAdam"
        shape = (3, 2)  # Muon takes matrices alone
        parameter = nn.Parameter(torch.randn(*shape))
        optimizer, events = OPTIMIZERS[name]([parameter], lr=0.01), []
        if hooked:
            for kind in STEP_KINDS:

                def hook(opt, args, kwargs, *, site):
                    events.append((str(site.kind), site.step, site.name))

                hl.attach_optimizer(optimizer, hook, on=kind)

        def closure():
            optimizer.zero_grad()
            loss = (parameter**2).sum()
            loss.backward()
            if sparse:
                parameter.grad = parameter.grad.to_sparse()
            return loss

        for _ in range(3):
            closure()
            optimizer.step(closure)
        return parameter.detach(), events

    (hooked, events), (plain, _) = run(True), run(False)
    assert events == [(kind, step, name) for step in range(3) for kind in STEP_KINDS]
    assert torch.equal(hooked, plain)


@BOTH
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_a_scaler_skips_fires_nothing(put, bad):
    """An infinite gradient: the scaler does not call step(); the next, finite one fires once."""
    optimizer, events = sgd(lr=1.0), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    everywhere = logger(events, "everywhere")
    for kind in STEP_KINDS:
        put(optimizer, logger(events, kind), kind)
    with (
        hl.attach_everywhere(everywhere, on="step_post")
        if put is by_hookline
        else torch_optimizer.register_optimizer_step_post_hook(everywhere)
    ):
        for factor in (bad, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight_of(optimizer) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor is bad:
                assert events == []
                assert weight_of(optimizer).tolist() == [1.0, 2.0]
    assert sorted(events) == ["everywhere", "step_post", "step_pre"]
    assert weight_of(optimizer).tolist() == [0.0, 1.0]
