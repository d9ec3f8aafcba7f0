"""Gradients of functions: this call's own, the same as in isolation, seen or edited, in every corner of autograd.

Each case runs one function in a graph that uses its inputs elsewhere too and its output twice. The reference is the
same function alone, on leaves, differentiated by ``torch.autograd.grad``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import Around, Pair, Scale, fresh, tensors_of
from torch import Tensor, nn

import hookline as hl


@dataclass(frozen=True)
class Case:
    """A target, a call of it, and the shapes of its inputs."""

    target: Any
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    in_place: bool = False
    """Whether it changes its first input."""
    views: bool = True
    """Whether it takes inputs that are not contiguous."""
    places: tuple[int, ...] | None = None
    """Where the inputs are among those of the function; in order by default."""


def _lstm(x: Tensor, *weights: Tensor) -> Any:
    state = torch.zeros(1, x.shape[1], 4)
    return torch.lstm(x, (state, state), list(weights), True, 1, 0.0, True, False, False)


aten = torch.ops.aten
MATRIX = ((3, 4),)
PAIR = ((3, 4), (3, 4))
CASES: dict[str, Case] = {
    "linear": Case(F.linear, F.linear, ((5, 3), (4, 3), (4,))),
    "linear by keyword": Case(
        F.linear, lambda x, w, b: F.linear(bias=b, weight=w, input=x), ((5, 3), (4, 3), (4,)), places=(2, 1, 0)
    ),
    "matmul": Case(torch.Tensor.matmul, lambda a, b: a @ b, ((5, 3), (3, 4))),
    "einsum of three": Case(
        torch.einsum, lambda x, w, v: torch.einsum("bij,jk,kl->bil", x, w, v), ((2, 5, 3), (3, 4), (4, 2))
    ),
    "attention": Case(
        F.scaled_dot_product_attention, F.scaled_dot_product_attention, ((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    ),
    "softmax": Case(F.softmax, lambda x: F.softmax(x, -1), MATRIX),
    "lstm": Case(torch.lstm, _lstm, ((5, 2, 3), (16, 3), (16, 4), (16,), (16,)), places=(0, 3, 4, 5, 6)),
    "cross entropy": Case(F.cross_entropy, lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])), MATRIX),
    "layer norm": Case(F.layer_norm, lambda x, w, b: F.layer_norm(x, (4,), w, b), ((3, 4), (4,), (4,))),
    "embedding": Case(F.embedding, lambda w: F.embedding(torch.tensor([[0, 1], [2, 1]]), w), ((4, 3),), places=(1,)),
    "square": Case(torch.Tensor.mul, lambda x: x * x, MATRIX),
    "cat": Case(torch.cat, lambda a, b: torch.cat([a, b], 1), ((3, 4), (3, 2))),
    "cat of one twice": Case(torch.cat, lambda a: torch.cat([a, a], 1), MATRIX),
    "split": Case(torch.split, lambda x: torch.split(x, 2), ((6, 4),)),
    "unbind": Case(torch.Tensor.unbind, lambda x: x.unbind(), MATRIX),
    "view": Case(torch.Tensor.view, lambda x: x.view(4, 3), MATRIX, views=False),
    "expand": Case(torch.Tensor.expand, lambda x: x.expand(2, 3, 4), MATRIX),
    "index": Case(torch.Tensor.__getitem__, lambda x: x[:, torch.tensor([0, 2])], MATRIX),
    "max": Case(torch.max, lambda x: torch.max(x, 1), MATRIX),
    "where": Case(torch.where, lambda a, b: torch.where(a > 0, a, b), PAIR, places=(1, 2)),
    "relu_": Case(torch.relu_, torch.relu_, MATRIX, in_place=True),
    "relu in place": Case(F.relu, lambda x: F.relu(x, inplace=True), MATRIX, in_place=True),
    "+=": Case(torch.Tensor.add_, lambda x, y: x.__iadd__(y), PAIR, in_place=True),
    "class": Case(Pair, lambda a, b: Pair.apply(a, b), PAIR),
    "class with a number": Case(Scale, lambda x: Scale.apply(x, 3.0), MATRIX),
}
STYLES: dict[str, tuple[int | None, int | None]] = {
    "watched": (None, None),
    "returned": (None, 1),
    "inputs scaled": (None, 3),
    "outputs scaled": (2, None),
}
"""By how much the hooks scale the gradients of the outputs, and of the inputs; None where they only watch."""
GIVEN = ("computed", "leaf", "view")


def _inputs(case: Case, given: str) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and the tensors made of them that go in."""
    leaves = [fresh(*shape, seed=index) for index, shape in enumerate(case.shapes)]
    if given == "leaf":
        return leaves, leaves
    if given == "computed":
        return leaves, [leaf * 1 for leaf in leaves]
    return leaves, [_strided(leaf * 1) for leaf in leaves]


def _strided(tensor: Tensor) -> Tensor:
    """The same values as every other column of a tensor twice as wide: a view, and not a reshape."""
    return torch.stack([tensor, tensor.detach()], -1)[..., 0]


def _reference(case: Case, weights: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the inputs of the function alone."""
    leaves = [fresh(*shape, seed=index) for index, shape in enumerate(case.shapes)]
    inputs = [leaf * 1 for leaf in leaves] if case.in_place else leaves
    outputs = tensors_of(case.run(*inputs))
    weights += [torch.randn(output.shape, generator=torch.Generator().manual_seed(9)) for output in outputs]
    return list(torch.autograd.grad(outputs, leaves, [2 * weight for weight in weights], allow_unused=True))


@pytest.mark.product(name=list(CASES), style=list(STYLES), given=list(GIVEN))
def test_gradients_are_those_of_the_function_alone(name: str, style: str, given: str) -> None:
    """Once per call: the summed gradient of each output, the call's own share of each input; edits reach the leaves."""
    case = CASES[name]
    of_outputs, of_inputs = STYLES[style]
    if (case.in_place and given == "leaf") or (given == "view" and not case.views):
        pytest.skip("torch itself does not allow it")
    if case.in_place and of_inputs is not None:
        pytest.skip("refused: no gate can stand in for the tensor")
    weights: list[Tensor] = []
    expected = _reference(case, weights)
    before: list[Any] = []
    after: list[Any] = []

    def pre(fn: Any, grad_outputs: Any) -> Any:
        before.append(_scaled(grad_outputs, 1))
        return None if of_outputs is None else _scaled(grad_outputs, of_outputs)

    def post(fn: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
        after.append((_scaled(grad_inputs, 1), _scaled(grad_outputs, 1)))
        return None if of_inputs is None else _scaled(grad_inputs, of_inputs)

    model = Around(case.run)
    leaves, inputs = _inputs(case, given)
    elsewhere = sum((x * x).sum() for x in inputs if not case.in_place)
    with (
        hl.attach_function(case.target, pre, on="backward_pre", within=model, observe=of_outputs is None),
        hl.attach_function(case.target, post, on="backward", within=model, observe=of_inputs is None),
    ):
        outputs = tensors_of(model(*inputs))
        elsewhere += sum((x * x).sum() for x in inputs if not case.in_place)
        loss = sum(((y * w).sum() + (w * y).sum() for y, w in zip(outputs, weights, strict=True)), elsewhere)
        loss.backward()
    assert (len(before), len(after)) == (1, 1)
    [grad_outputs], [(grad_inputs, grad_outputs_again)] = before, after
    doubled = of_outputs or 1
    _assert_close([grad for grad in grad_outputs if grad is not None], [2 * weight for weight in weights])
    _assert_close([grad for grad in grad_outputs_again if grad is not None], [2 * doubled * w for w in weights])
    places = case.places or range(len(expected))
    _assert_close([grad_inputs[place] for place in places], _scaled(expected, doubled))
    for leaf, grad in zip(leaves, _scaled(expected, doubled * (of_inputs or 1)), strict=True):
        total = (0 if grad is None else grad) + (0 if case.in_place else 4 * leaf.detach())
        torch.testing.assert_close(leaf.grad, total)


def _scaled(grads: Any, factor: int) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else grad * factor for grad in grads)


def _assert_close(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if other is None:
            assert one is None
        else:
            assert one is not None
            torch.testing.assert_close(one, other)


# -- order -------------------------------------------------------------------------------------------------


MODULES: dict[str, tuple[Callable[[], nn.Module], Any, Any, tuple[tuple[int, ...], ...]]] = {
    "Linear": (lambda: nn.Linear(3, 2), F.linear, aten.addmm.default, ((4, 3),)),
    "LayerNorm": (lambda: nn.LayerNorm(3), F.layer_norm, aten.native_layer_norm.default, ((4, 3),)),
    "Softmax": (lambda: nn.Softmax(-1), F.softmax, aten._softmax.default, ((4, 3),)),
    "Bilinear": (lambda: nn.Bilinear(3, 2, 2), F.bilinear, aten._trilinear.default, ((4, 3), (4, 2))),
}


@pytest.mark.product(
    name=list(MODULES),
    with_operator={"functions": False, "operators too": True},
    module_edits={"module watched": False, "module edited": True},
    function_edits={"function watched": False, "function edited": True},
    given=["leaf", "computed", "data"],
)
def test_module_function_and_operator_open_and_close_like_brackets(
    name: str, with_operator: bool, module_edits: bool, function_edits: bool, given: str
) -> None:
    """Forward: module pre, function pre, operator pre, and back out; backward: module pre, function pre, and back."""
    make, function, operator, shapes = MODULES[name]
    module, events = make(), []

    def labelled(label: str, edits: bool) -> Callable[..., Any]:
        def watch(*args: Any) -> None:
            events.append(label)

        def edit(site: Any, values: Any, *more: Any) -> Any:
            events.append(label)
            return None if "forward" in label else values

        return edit if edits else watch

    leaves = [fresh(*shape, seed=index, requires_grad=given != "data") for index, shape in enumerate(shapes)]
    inputs = [leaf * 1 for leaf in leaves] if given == "computed" else leaves
    if given == "data" and not list(module.parameters()):
        pytest.skip("there is no backward pass")
    handles = []
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        if with_operator and "forward" in kind:
            hook = labelled(f"operator {kind}", function_edits)
            handles.append(hl.attach_function(operator, hook, on=kind, within=module))
        hook = labelled(f"function {kind}", function_edits)
        handles.append(hl.attach_function(function, hook, on=kind, within=module))
        handles.append(hl.attach(module, labelled(f"module {kind}", module_edits), on=kind))
    with hl.HandleSet(handles):
        module(*inputs).sum().backward()
    inner = ["module", "function", "operator"] if with_operator else ["module", "function"]
    forward = [f"{level} forward_pre" for level in inner] + [f"{level} forward" for level in reversed(inner)]
    backward = ["module backward_pre", "function backward_pre", "function backward", "module backward"]
    assert events == forward + backward


CHANGES = {
    "t_": lambda v: v.t_(),
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "transpose_": lambda v: v.transpose_(0, 1),
    "add_ to itself": lambda v: v.add_(v),
    "register_hook": lambda v: v.register_hook(lambda grad: grad * 2),
}


def test_what_is_about_the_tensor_itself_is_not_done_to_an_alias() -> None:
    """With a hook that may edit, inputs go in as aliases; not where the caller goes on with the tensor it gave."""

    def run(change: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, 3, requires_grad=True)
        v = x * 1
        change(v)
        y = v * torch.arange(9.0).view(3, 3)
        y.pow(2).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    expected = {name: run(change) for name, change in CHANGES.items()}
    with hl.attach_function("*", lambda fn, grad_inputs, grad_outputs: grad_inputs, on="backward"):
        found = {name: run(change) for name, change in CHANGES.items()}
    torch.testing.assert_close(found, expected)
    with pytest.raises(hl.errors.KindError, match="observe=True"):
        hl.attach_function("torch.Tensor.add_", lambda fn, grads, _: grads, on="backward")


def test_what_is_given_back_stays_itself_and_can_be_written() -> None:
    """``contiguous`` gives most tensors back as they are: an alias of one would be a view that nobody may change."""
    x = torch.ones(2, requires_grad=True)
    with hl.attach_function("*.contiguous", lambda fn, grad_inputs, _: grad_inputs, on="backward"):
        y = x * 1
        assert x.contiguous() is x
        assert y.contiguous() is y
        y.contiguous().add_(1).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


@pytest.mark.parametrize("glob", ["*", "torch.*", "torch.Tensor.*"])
def test_a_glob_leaves_alone_what_is_about_the_tensor_itself(glob: str) -> None:
    """Kept gradients, copies and layers that initialise themselves in place."""
    x = torch.ones(2, requires_grad=True)
    with hl.attach_function(glob, lambda fn, grad_inputs, grad_outputs: grad_inputs, on="backward"):
        y = x * 2
        y.retain_grad()
        y.sum().backward()
        assert torch.equal(y.grad, torch.ones(2))
        assert torch.equal(copy.deepcopy(x), x)
        nn.Linear(2, 2)
