"""Gradient hooks on functions in every kind of backward pass, under transforms, and where tensors change in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_functions import Around, Pair, Scale, fresh
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hookline as hl

# -- kinds of backward pass --------------------------------------------------------------------------------


@pytest.mark.parametrize("editing", [False, True], ids=["watched", "returned"])
@pytest.mark.parametrize(
    ("target", "run"),
    [("torch.tanh", torch.tanh), (Scale, lambda x: Scale.apply(x, 3.0))],
    ids=["function", "class"],
)
class TestPasses:
    """Ways to run a backward pass, with a hook that watches and one that hands back what it got."""

    def hook(self, seen: list[Any], editing: bool) -> Callable[..., Any]:
        def watch(fn: Any, grad_inputs: Any, grad_outputs: Any) -> None:
            seen.append((grad_inputs[0].detach().clone(), grad_outputs[0].detach().clone()))

        def edit(fn: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
            watch(fn, grad_inputs, grad_outputs)
            return grad_inputs

        return edit if editing else watch

    def test_twice_with_retain_graph(self, target: Any, run: Any, editing: bool) -> None:
        """Each pass fires once, with its own gradients."""
        x, seen = fresh(3), []
        with hl.attach_function(target, self.hook(seen, editing), on="backward"):
            y = run(x * 1)
            y.sum().backward(retain_graph=True)
            (2 * y).sum().backward()
        assert len(seen) == 2
        torch.testing.assert_close(seen[1][0], 2 * seen[0][0])
        torch.testing.assert_close(x.grad, 3 * seen[0][0])

    def test_autograd_grad(self, target: Any, run: Any, editing: bool) -> None:
        """autograd.grad fires too, and leaves .grad alone."""
        x, seen = fresh(3), []
        h = x * 1
        with hl.attach_function(target, self.hook(seen, editing), on="backward"):
            y = run(h)
            (grad,) = torch.autograd.grad(y.sum(), h)
        assert len(seen) == 1
        assert torch.equal(grad, seen[0][0])
        assert x.grad is None

    def test_double_backward(self, target: Any, run: Any, editing: bool) -> None:
        """A second derivative is the same as without hooks."""
        x, seen = fresh(3), []

        def second() -> Tensor:
            (first,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
            (grad,) = torch.autograd.grad(first.square().sum(), x)
            return grad

        expected = second()
        with hl.attach_function(target, self.hook(seen, editing), on="backward"):
            torch.testing.assert_close(second(), expected)
        assert len(seen) >= 1

    def test_two_calls_in_one_graph(self, target: Any, run: Any, editing: bool) -> None:
        """Each call has its own gradients, the later call first."""
        x, seen = fresh(3), []
        with hl.attach_function(target, self.hook(seen, editing), on="backward"):
            (run(x) * 2 + run(x) * 5).sum().backward()
        assert sorted(grads[1][0].item() for grads in seen) == [2.0, 5.0]


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


IN_PLACE: dict[str, tuple[str, Callable[[Tensor], Any], float]] = {
    "+=": ("torch.Tensor.add_", lambda v: v.__iadd__(v), 2.0),
    "addcmul_": ("torch.Tensor.addcmul_", lambda v: v.addcmul_(v, torch.full_like(v, 2.0).detach()), 3.0),
}


@pytest.mark.parametrize("shape", [(2, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("case", IN_PLACE)
def test_a_transposed_tensor_that_is_added_to_itself(case: str, shape: tuple[int, int]) -> None:
    """Its share comes by way of the tensor behind it and by way of the view: both are counted, each as it lies."""
    target, run, factor = IN_PLACE[case]
    weights = torch.arange(float(shape[0] * shape[1])).view(shape)
    seen: list[Any] = []
    grads = []
    for hooked in (False, True):
        w = fresh(*shape)
        handle = hl.attach_function(target, lambda fn, *grads: seen.append(grads), on="backward", observe=True)
        if not hooked:
            handle.remove(quiet=True)
        v = (w * 1).T.contiguous().T
        run(v)
        (v * weights).sum().backward()
        handle.remove(quiet=True)
        grads.append(w.grad)
    ((grad_inputs, grad_outputs),) = seen
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grad_outputs[0], weights)
    assert torch.equal(grad_inputs[0], weights * factor)
    assert grad_inputs[1:] == (None,) * (len(grad_inputs) - 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w * 1,
        lambda w: (w * 1).view(3, 2).view(2, 3),
        lambda w: (w * 1).T.contiguous().T,
        lambda w: torch.cat([w * 1, w * 0])[:2],
    ],
    ids=["plain", "reshaped", "transposed", "part"],
)
def test_an_input_that_is_read_and_then_changed_is_reported_once(make: Callable[[Tensor], Tensor]) -> None:
    """Of a module, say: one share comes by the view, one past it, and the hook is shown their sum."""

    def read_and_change(x: Tensor) -> Tensor:
        tripled = x * 3
        x.add_(1)
        return x * 2 + tripled

    def watch(module: nn.Module, grads: Any, _: Any) -> None:
        seen.append(grads[0])

    seen: list[Tensor] = []
    weights, model, w = torch.arange(1.0, 7.0).view(2, 3), Around(read_and_change), fresh(2, 3)
    with hl.attach(model, watch, on="backward"):
        (model(make(w)) * weights).sum().backward()
    torch.testing.assert_close(seen.pop(), weights * 5)
    torch.testing.assert_close(w.grad, weights * 5)
