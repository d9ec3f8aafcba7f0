"""PyTorch: hooks on modules whose forward is repeated by activation checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers_models import Scale, assert_same_grads, leaf, mlp, twin
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

EDITING = pytest.mark.parametrize("editing", [False, True], ids=["observing", "editing"])


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_under_checkpointing_the_recomputed_forward_is_marked(use_reentrant):
    """Each logical forward has one firing that is no recompute; the repeated one says so on its site."""
    model, x, marks = mlp(), leaf(4, 3), []

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = model

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=use_reentrant) * 1

    outer = Checkpointed()
    hl.attach(outer, "block.0", lambda m, args, out, *, site: marks.append((site.step, site.recompute)))
    for _ in range(2):
        outer(x).sum().backward()
    assert marks == [(0, False), (0, True), (1, False), (1, True)]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_a_checkpointed_model_counts_its_recompute_as_no_new_step(use_reentrant):
    """If the hooked model itself is checkpointed, its second forward belongs to the step of the first."""
    model, x, moments = mlp(), leaf(4, 3), []
    handle = hl.attach(model, "0", lambda m, args, out, *, site: moments.append((site.step, site.recompute)))
    for _ in range(2):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert moments == [(0, False), (0, True), (1, False), (1, True)]
    assert handle.report().last_step == 1


@EDITING
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_under_checkpointing_gradient_hooks_fire_once_with_the_right_gradients(use_reentrant, editing):
    """Backward hooks inside a checkpointed block fire once per backward, and all gradients stay the same."""
    model, x, seen = mlp(), leaf(4, 3), []
    reference, x_reference = copy.deepcopy(model), twin(x)

    def hook(module, grad_input, grad_output, *, site):
        grads = [parameter.grad.clone() for parameter in module.parameters()]
        seen.append((site.name, grad_input[0], grad_output[0], grads))
        return grad_input if editing else None

    hl.attach(model, "#", hook, on="backward")
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    hidden = [x_reference]
    for layer in reference:
        hidden.append(layer(hidden[-1]))
        hidden[-1].retain_grad()
    hidden[-1].square().sum().backward()
    assert [name for name, *_ in seen] == ["2", "1", "0"]
    for name, grad_input, grad_output, grads in seen:
        assert torch.equal(grad_input, hidden[int(name)].grad), name
        assert torch.equal(grad_output, hidden[int(name) + 1].grad), name
        for grad, parameter in zip(grads, reference[int(name)].parameters(), strict=True):
            assert torch.equal(grad, parameter.grad), name
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_under_checkpointing_gradient_hooks_carry_the_index_of_the_logical_call(use_reentrant):
    """A block that is checkpointed twice in one forward meets its backward as call 1, then call 0.

    Reentrant checkpointing only builds a graph when it repeats the forward, and numbers the calls as it does.
    """
    calls, x = [], leaf(2)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Scale(2.0)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=use_reentrant)
            return x

    model = Twice()

    def hook(module, grad_input, grad_output, *, site):
        calls.append((site.step, site.call, grad_output[0].tolist()))

    hl.attach(model, "block", hook, on="backward")
    for _ in range(2):
        model(x).sum().backward()
    first, second = (0, 1) if use_reentrant else (1, 0)
    expected = [(first, [1.0, 1.0]), (second, [2.0, 2.0])]
    assert calls == [(step, *rest) for step in range(2) for rest in expected]
