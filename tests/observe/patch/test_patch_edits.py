"""Each edit against the same edit written into the model by hand: values, gradients, parts, dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_patch import by_hand, gradients, made
from torch import Tensor, nn

import hookline as hl

V = torch.tensor([1.0, -2.0, 0.5, 3.0])
MASK = torch.tensor([[True, False, True], [False, False, True]])


def _put(x: Tensor, index: object, value: Tensor | float) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def _same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether gradients are equal; one that is cut off may be None or zeros."""
    zeros = [(a, b) for a, b in zip(one, other, strict=True) if a is None or b is None]
    both = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return all(not (a if b is None else b).any() for a, b in zeros if (a, b) != (None, None)) and all(
        torch.equal(a, b) for a, b in both
    )


EDITS = {
    "ablate": (hl.edits.ablate(), torch.zeros_like),
    "ablate to a number": (hl.edits.ablate(1.5), lambda x: torch.full_like(x, 1.5)),
    "scale": (hl.edits.scale(0.25), lambda x: x * 0.25),
    "scale units": (hl.edits.scale(V), lambda x: x * V),
    "steer": (hl.edits.steer(V, 2.0), lambda x: x + V * 2.0),
    "steer by default": (hl.edits.steer(V), lambda x: x + V),
    "steer each position": (hl.edits.steer(torch.arange(12.0).view(3, 4)), lambda x: x + torch.arange(12.0).view(3, 4)),
    "replace": (hl.edits.replace(torch.ones(2, 3, 4)), torch.ones_like),
    "replace, broadcast": (hl.edits.replace(V), lambda x: V.expand(x.shape).clone()),
    "replace by a number": (hl.edits.replace(2), lambda x: torch.full_like(x, 2.0)),
    "a function": (lambda x: x.flip(-1), lambda x: x.flip(-1)),
    "a module": (nn.Tanh(), torch.tanh),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_the_same_line_in_the_model_does(name):
    """Outputs and the gradients of all parameters are those of a model with the edit written into it, to the bit."""
    edit, line = EDITS[name]
    model, x = made()
    output, grads = by_hand(model, x, line)
    with hl.patch(model, {"layers.1": edit}) as patched:
        found = model(x)
        assert torch.equal(found, output)
        assert _same(gradients(model, found), grads)
    assert patched.report()[0].fired == 1


PARTS = {
    "a number": (0, 0),
    "the last position": ((slice(None), -1), (slice(None), -1)),
    "some units": ((..., slice(1, 3)), (..., slice(1, 3))),
    "one unit": ((..., 2), (..., 2)),
    "a slice": (slice(1, None), slice(1, None)),
    "a numpy number": (np.int64(1), 1),
    "places": (torch.tensor([1, 0]), torch.tensor([1, 0])),
    "a list of places": ((slice(None), [0, 2]), (slice(None), [0, 2])),
    "a range of places": ((slice(None), range(2)), (slice(None), [0, 1])),
    "int32 places": ((slice(None), torch.tensor([2], dtype=torch.int32)), (slice(None), [2])),
    "a mask": (MASK, MASK),
    "a mask of positions": ((slice(None), MASK[0]), (slice(None), MASK[0])),
    "number and places": ((0, [1, 2]), (0, [1, 2])),
    "places and number": (([0, 1], slice(None), 3), ([0, 1], slice(None), 3)),
    "two lists": (([0, 1], [2, 0]), ([0, 1], [2, 0])),
    "everything": (..., ...),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_edit_of_a_part_leaves_the_rest_alone(part):
    """Values and gradients are those of ``x[index] = x[index] * 3`` in the model, on a copy."""
    given, brackets = PARTS[part]
    model, x = made()
    output, grads = by_hand(model, x, lambda h: _put(h, brackets, h[brackets] * 3))
    for edit in (hl.edits.scale(3.0, index=given), hl.edits.scale(3.0)):
        with hl.patch(model, {"layers.1": edit}, index=None if edit.index else given):
            found = model(x)
        assert torch.equal(found, output)
        assert _same(gradients(model, found), grads)


@pytest.mark.parametrize(
    "maker", [hl.edits.replace, lambda t: hl.edits.swap({"0": t}), lambda t: hl.edits.replace(t, index=...)]
)
def test_gradients_flow_into_what_was_put_in(maker):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given = torch.randn(3, 4, requires_grad=True)
    with hl.patch(model, {"0": maker(given)}):
        model(torch.randn(3, 4)).sum().backward()
    torch.testing.assert_close(given.grad, model[1].weight.sum(0).expand(3, 4))
    assert model[0].weight.grad is None or not model[0].weight.grad.any()


@pytest.mark.parametrize("given", [torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_given_is_converted_to_the_activation(dtype, given):
    """A model in bf16 is steered by a vector of any dtype, and its activations stay in bf16."""
    model, x = made()
    model, x = model.to(dtype), x.to(dtype)
    expected = model(x, lambda h: h + V.to(given).to(dtype))
    with hl.patch(model, {"layers.1": hl.edits.steer(V.to(given))}):
        found = model(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_an_edit_leaves_the_output_itself_alone():
    """Who holds the tensor from before the edit, a hook that sees it raw, finds it as it was."""
    model, x = made()
    raw = []
    expected = model.layers[0](x)
    hl.attach(model, "layers.0", lambda m, args, output: raw.append(output), prepend=True)
    with hl.patch(model, {"layers.0": hl.edits.ablate(index=0)}):
        model(x)
    assert torch.equal(raw[0], expected)


def test_edits_of_one_site_are_made_in_the_order_they_were_attached():
    """Within a patch in that of the mapping, then patch by patch; the last is seen by observers."""
    model, x = made()
    seen = []
    hl.attach(model, "layers.1", lambda m, args, output: seen.append(output), observe=True)
    with (
        hl.patch(model, {"layers.1": hl.edits.scale(2.0), "layers.*1": hl.edits.steer(V)}),
        hl.patch(model, {"layers.1": hl.edits.scale(10.0)}),
    ):
        model(x)
    plain = model.layers[1](model.layers[0](x))
    assert torch.equal(seen[0], (plain * 2 + V) * 10)


def test_an_edit_runs_again_where_activation_checkpointing_runs_a_layer_again():
    """Gradients are those of the model without checkpointing, if the backward is inside the block."""
    model, x = made()
    x.requires_grad_()

    def run(checkpointed: bool) -> Tensor:
        with hl.patch(model, {"layers.1": hl.edits.scale(3.0)}):
            h = model.layers[0](x)
            if checkpointed:
                h = torch.utils.checkpoint.checkpoint(model.layers[1], h, use_reentrant=False)
            else:
                h = model.layers[1](h)
            return torch.autograd.grad(h.square().sum(), x)[0]

    assert torch.equal(run(True), run(False))
