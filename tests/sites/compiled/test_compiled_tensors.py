"""`attach_tensor` inside a compiled function: part of the graph, as torch's own ``register_hook`` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_compiled import breaks, graphs
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import hookline as hl

# torch's own, on torch 2.11, where it traces a hook on a tensor of the function's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

WEIGHT = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def on_intermediate(x: Tensor) -> Tensor:
    """A tensor of the function's own, used before and after."""
    y = x * 2
    before = y + 1
    hl.attach_tensor(y, lambda grad: grad * 3)
    return (before + y * 5).sum()


def on_input(x: Tensor) -> Tensor:
    """An argument, with a hook that closes over another tensor."""
    y = x.sin()
    hl.attach_tensor(x, lambda grad: grad + y.detach())
    return (y * x).sum()


def on_parameter(x: Tensor) -> Tensor:
    """A leaf that the function finds by itself, with several hooks in order."""
    hl.attach_tensor(WEIGHT, lambda grad: grad + 1)
    hl.attach_tensor(WEIGHT, lambda grad: grad * 2)
    return (x * WEIGHT).sum()


def removed_inside(x: Tensor) -> Tensor:
    """A handle that is removed where it was made."""
    handle = hl.attach_tensor(x, lambda grad: grad * 100)
    y = x * 2
    handle.remove()
    handle.remove()
    hl.attach_tensor(x, lambda grad: grad * 3)
    return y.sum()


def observed(x: Tensor) -> Tensor:
    """A hook whose return value does not count."""
    y = x * 2
    hl.attach_tensor(y, lambda grad: grad * 100, observe=True, name="looks")
    hl.attach_tensor(x, lambda grad: grad * 100, observe=True)
    return y.sum()


def accumulated(x: Tensor) -> Tensor:
    """A hook on what a leaf has accumulated."""
    hl.attach_tensor(WEIGHT, _halve, on="param_grad")
    return (x * WEIGHT).sum()


def _halve(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(0.5)


def gradients(function: Callable[[Tensor], Any]) -> tuple[Tensor | None, Tensor | None]:
    """What comes of a backward pass, for the argument and for the parameter."""
    x = torch.tensor([0.5, 1.0, -1.5], requires_grad=True)
    WEIGHT.grad = None
    # The hooks are the function's own and stay with the leaf: each run has a leaf of its own.
    leaf = globals()["WEIGHT"] = nn.Parameter(WEIGHT.detach().clone())
    function(x).backward()
    return x.grad, leaf.grad


FUNCTIONS = [on_intermediate, on_input, on_parameter, removed_inside, observed, accumulated]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_hook_attached_inside_is_part_of_one_graph(function: Callable[[Tensor], Tensor], backend: str) -> None:
    """Under ``fullgraph=True``, with the gradients of an eager run."""
    expected = gradients(function)
    found = gradients(torch.compile(function, backend=backend, fullgraph=True))
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    assert found[1] is None or torch.equal(found[1], expected[1])
    assert (graphs(), breaks()) == (1, 0)


def test_a_handle_from_inside_comes_out_and_removes() -> None:
    """It is torch's own, and keeps no receipt: to ask for one is an error that says so."""

    def function(x: Tensor) -> tuple[Tensor, RemovableHandle]:
        handle = hl.attach_tensor(x, lambda grad: grad * 2)
        return x * 1, handle

    x = torch.ones(2, requires_grad=True)
    out, handle = torch.compile(function, backend="eager", fullgraph=True)(x)
    assert isinstance(handle, RemovableHandle)
    with pytest.raises(AttributeError):
        handle.report()
    out.sum().backward(retain_graph=True)
    handle.remove()
    out.sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_tensor_without_a_gradient_is_refused_inside_too() -> None:
    """The error is that of an eager call."""

    def function(x: Tensor) -> Tensor:
        hl.attach_tensor(x, lambda grad: grad)
        return x * 2

    with pytest.raises(hl.errors.UnhookableError, match="needs no gradient"):
        torch.compile(function, backend="eager")(torch.ones(2))
