"""Gradients in corners: leaves handed back, outputs that are used inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hookline as hl


class Both(nn.Module):
    """Gives out a tensor that it uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x)
        return h, self.b(h)


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout().eval()])
def test_a_leaf_handed_back_goes_out_as_an_alias_and_is_reported(module: nn.Module, kind: str) -> None:
    """A leaf cannot be tapped for one call alone: here the module reports its own share, and sums may be regrouped."""
    seen = []

    def look(module, *grads):
        seen.append(grads[0][0])

    leaf = torch.randn(64, requires_grad=True)
    with hl.attach(module, look, on=kind):
        (3 * module(leaf) + 2 * leaf).sum().backward()
    assert [grad.unique().tolist() for grad in seen] == [[3.0]]
    assert leaf.grad.unique().tolist() == [5.0]


def test_the_users_inside_a_module_are_not_reported_as_its_outputs_users() -> None:
    """Of the first output, only what came from outside: 1, not what the second layer sent back."""
    model, seen = Both(), []

    def look(module, grad_output):
        seen.append(grad_output)

    with hl.attach(model, look, on="backward_pre"):
        first, second = model(torch.ones(1, 3))
        (first.sum() + 2 * second.sum()).backward()
    assert [grad.tolist() for grad in seen[0]] == [[[1.0] * 3], [[2.0] * 3]]


class Adds(nn.Module):
    def forward(self, x, cache):
        return x + cache["h"]


class SharesDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Adds(), Adds()

    def forward(self, x, cache):
        return self.b(self.a(x, cache), cache)


def test_a_dict_of_the_caller_has_its_own_tensors_again_after_an_edited_call():
    """Two modules share it: each edit is made once, of each module's own share."""
    model, h = SharesDict(), torch.ones(1, requires_grad=True)
    cache, seen = {"h": h}, []

    def double(module, grad_input, grad_output):
        seen.append([None if grad is None else grad.item() for grad in grad_input])
        return tuple(None if grad is None else grad * 2 for grad in grad_input)

    with hl.attach(model, ["a", "b"], double, on="backward"):
        model(torch.zeros(1), cache).sum().backward()
    assert cache["h"] is h
    assert seen == [[1.0, 1.0], [None, 2.0]]
    assert h.grad.item() == 6.0


def test_what_an_observer_returns_is_no_input_of_a_call_with_gradient_hooks() -> None:
    """The slot of observers also gives the inputs their gradients."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    expected = model(x)
    seen: list[Any] = []
    observer = hl.attach(model, lambda module, args: (args[0] * 0,), on="forward_pre", observe=True)
    with observer, hl.attach(model, lambda module, given, out: seen.append(given), on="backward"):
        output = model(x)
        output.sum().backward()
    assert torch.equal(output, expected)
    assert len(seen) == 1
