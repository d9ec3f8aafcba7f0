"""Under hooks on functions that only watch, what is the caller's stays the caller's; programs compare the bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl


def reading(fn: Any, *tensors: Any) -> None:
    """Reads all that it is shown, with operators of its own, and returns nothing."""
    for group in tensors:
        for tensor in group:
            if tensor is not None and tensor.is_floating_point() and tensor.numel():
                tensor.detach().double().square().mean()


MAKERS: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(3, requires_grad=True),
    "randn": lambda: torch.randn(3, requires_grad=True),
    "tensor": lambda: torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
    "requires_grad_": lambda: torch.ones(3).requires_grad_(),
    "empty_like": lambda: torch.zeros_like(torch.ones(3), requires_grad=True),
    "init": lambda: nn.init.ones_(nn.Parameter(torch.zeros(3))),
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("how", MAKERS)
def test_a_leaf_that_is_made_under_a_watching_hook_is_a_leaf(how: str, kind: str) -> None:
    """It gets its gradient, and an optimizer takes it."""
    with hl.attach_function("*", reading, on=kind):
        leaf = MAKERS[how]()
        assert leaf.is_leaf
        (leaf * 2).sum().backward()
        torch.optim.SGD([leaf], lr=0.1)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


HANDED_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to("cpu"),
    "float": lambda x: x.float(),
    "requires_grad_": lambda x: x.requires_grad_(),
    "dropout": lambda x: F.dropout(x, training=False),
}


@pytest.mark.product(how=list(HANDED_BACK), given=["leaf", "computed"], kind=["forward", "backward"])
def test_what_a_function_hands_back_as_it_is_stays_the_same_object(how: str, given: str, kind: str) -> None:
    """A watching hook does not put another tensor in its place."""
    x = torch.ones(3, requires_grad=True)
    if given == "computed":
        if how == "requires_grad_":
            pytest.skip("torch itself does not allow it")
        x = x * 1
    assert HANDED_BACK[how](x) is x
    with hl.attach_function("*", reading, on=kind):
        assert HANDED_BACK[how](x) is x


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_model_built_moved_copied_and_saved_under_watching_hooks_is_as_without(kind: str) -> None:
    """Construction, dtype, deepcopy, state dict, tied and normalised weights: parameters stay parameters and leaves."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
        model = copy.deepcopy(model).double().float()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        model.load_state_dict(torch.load(buffer))
        model(torch.ones(2, 3)).sum().backward()
        return model

    expected = build()
    with hl.attach_function("*", reading, on=kind):
        model = build()
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(one, nn.Parameter), name
        assert one.is_leaf, name
        assert torch.equal(one, other), name
        assert torch.equal(one.grad, other.grad), name
