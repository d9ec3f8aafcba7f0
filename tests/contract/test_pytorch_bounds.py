"""PyTorch's recipes with hooks as verbs: clipping gradients and freezing parameters."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers_models import assert_same_grads, leaf, mlp, twin
from helpers_modules import assert_untouched

import hookline as hl


def reference_grads(model, x, scale=100.0):
    clone, x = copy.deepcopy(model), twin(x)
    clone.zero_grad()
    (clone(x) * scale).sum().backward()
    return clone, x


def test_clipping_by_value_bounds_parameters_and_grad_input_of_the_named_module_alone():
    """Both .grad of its parameters and what it sends upstream are within ±value; later layers are untouched."""
    model, x = mlp(), leaf(4, 3)
    reference, _ = reference_grads(model, x)
    sent = []
    with hl.clip_gradients(model, "2", value=0.5):
        hl.attach(model, "2", lambda m, gi, go: sent.append(gi[0]), on="backward", observe=True)
        (model(x) * 100).sum().backward()
    assert torch.equal(model[2].weight.grad, reference[2].weight.grad.clamp(-0.5, 0.5))
    assert torch.equal(model[2].bias.grad, reference[2].bias.grad.clamp(-0.5, 0.5))
    unclipped = torch.full((4, 2), 100.0) @ model[2].weight
    assert unclipped.abs().max() > 0.5
    assert torch.equal(sent[0], unclipped.clamp(-0.5, 0.5))
    # The layer below gets the bounded gradient and is not bounded itself.
    hidden = model[1](model[0](x)).detach()
    expected = (unclipped.clamp(-0.5, 0.5) * (1 - hidden**2)).sum(0)
    torch.testing.assert_close(model[0].bias.grad, expected)


def test_clipping_by_norm_scales_what_is_above_and_leaves_the_rest_bit_identical():
    """A gradient above the norm is scaled down to it; one within it is not touched."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = reference_grads(model, x)
    with hl.clip_gradients(model, "0", norm=1.0):
        (model(x) * 100).sum().backward()
    for parameter, before in zip(model[0].parameters(), reference[0].parameters(), strict=True):
        assert before.grad.norm() > 1
        torch.testing.assert_close(parameter.grad, before.grad / before.grad.norm())
    torch.testing.assert_close(x.grad, x_reference.grad / x_reference.grad.norm())
    for parameter, before in zip(model[2].parameters(), reference[2].parameters(), strict=True):
        assert torch.equal(parameter.grad, before.grad)
    model.zero_grad()
    x.grad = None
    reference, x_reference = reference_grads(model, x, scale=1e-3)
    with hl.clip_gradients(model, "0", norm=1.0):
        (model(x) * 1e-3).sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)


@pytest.mark.parametrize("bounds", [{}, {"value": 1.0, "norm": 1.0}, {"value": 0.0}, {"norm": -1.0}], ids=repr)
def test_clipping_needs_one_positive_bound(bounds):
    """Neither, both, or a bound that is not positive: a ValueError, and nothing on the model."""
    model = mlp()
    with pytest.raises(ValueError, match="clip_gradients") as caught:
        hl.clip_gradients(model, "*", **bounds)
    assert isinstance(caught.value, hl.HooklineError)
    assert_untouched(model)


def test_clipping_is_all_or_nothing():
    """If a module cannot take the hook, the parameters of the others are not clipped either."""
    model, x = mlp(), leaf(4, 3)
    reference, _ = reference_grads(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # what torch 2.14 and later make of it
        model[1] = torch.jit.script(model[1])
    with pytest.raises(hl.errors.UnhookableError):
        hl.clip_gradients(model, ["0", "1"], value=1e-3)
    (model(x) * 100).sum().backward()
    assert_same_grads(model, reference)
    for parameter in model.parameters():
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ],
    ids=["sgd", "adamw"],
)
def test_freezing_keeps_the_named_parameters_and_leaves_gradients_upstream_alone(optimizer):
    """Through momentum and weight decay the frozen layer does not move, and all others get the same gradients."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = copy.deepcopy(model), twin(x)
    stepper = optimizer(model.parameters())
    model(x).square().sum().backward()
    reference(x_reference).square().sum().backward()
    stepper.step()  # momentum is in place before the freeze
    reference.load_state_dict(model.state_dict())
    frozen = [parameter.detach().clone() for parameter in model[2].parameters()]
    with hl.freeze(model, "2"):
        stepper.step()
        assert all(torch.equal(p, old) for p, old in zip(model[2].parameters(), frozen, strict=True))
        reference.load_state_dict(model.state_dict())
        stepper.zero_grad()
        reference.zero_grad()
        x.grad = x_reference.grad = None
        model(x).square().sum().backward()
        reference(x_reference).square().sum().backward()
        assert all(parameter.grad is None for parameter in model[2].parameters())
        assert_same_grads(model[0], reference[0])
        assert torch.equal(x.grad, x_reference.grad)
        stepper.step()
    assert all(torch.equal(p, old) for p, old in zip(model[2].parameters(), frozen, strict=True))
    assert not torch.equal(model[0].weight, reference[0].weight)
    stepper.zero_grad()
    model(x).square().sum().backward()
    stepper.step()
    assert not torch.equal(model[2].weight, frozen[0])
