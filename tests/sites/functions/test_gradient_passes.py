"""Gradient hooks on functions in every kind of backward pass, under transforms, and where tensors change in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_functions import Pair, fresh
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hookline as hl

# -- kinds of backward pass --------------------------------------------------------------------------------


@pytest.mark.parametrize("editing", [False, True], ids=["watched", "returned"])
def test_of_several_outputs_the_unused_ones_have_none(editing: bool) -> None:
    """A split of which one piece is used, a Function of which one output is."""
    seen: list[Any] = []

    def hook(fn: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
        seen.append([grad is not None for grad in grad_outputs])
        return grad_inputs if editing else None

    x = fresh(6)
    with hl.attach_function(["torch.Tensor.split", Pair], hook, on="backward", observe=not editing):
        x.split(2)[1].sum().backward()
        assert x.grad.tolist() == [0, 0, 1, 1, 0, 0]
        a, b = fresh(2), fresh(2, seed=1)
        Pair.apply(a, b)[1].sum().backward()
    assert seen[0] == [False, True, False]
    assert seen[1][1]
    assert a.grad.tolist() == b.grad.tolist() == [1, 1]


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(2)),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).square().sum())(x),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "per-sample grad": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x.expand(4, -1)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, in its forward mode
@pytest.mark.product(
    transform=list(TRANSFORMS),
    target=["torch.nn.functional.*", "module"],
    kind=["backward_pre", "backward"],
    editing={"watched": False, "returned": True},
)
def test_transforms_run_beside_gradient_hooks(transform: str, target: str, kind: str, editing: bool) -> None:
    """Parameters that need gradients, but that the transform was not told of, are left alone; values are as before."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Identity()), fresh(3, requires_grad=False)

    def hook(where: Any, *grads: Any) -> Any:
        return grads[0] if editing else None

    expected = tree_leaves(TRANSFORMS[transform](model, x))
    if target == "module":
        handle = hl.attach(model, "*", hook, on=kind, observe=not editing)
    else:
        handle = hl.attach_function(target, hook, on=kind, observe=not editing)
    got = tree_leaves(TRANSFORMS[transform](model, x))
    handle.remove(quiet=True)
    assert all(map(torch.equal, got, expected))
