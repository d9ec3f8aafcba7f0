"""attach_node: before and after a node of the graph runs, the order around it, what is refused, what is freed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import hookline as hl
from hookline.sites import tensors as nodes

KINDS = ("pre", "post")


class Doubles(torch.autograd.Function):
    """An operation of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def ignore(*grads: Any) -> None:
    """A hook that does nothing."""


def logging(log: list[Any], what: Any) -> Any:
    """A hook of any kind that notes that it ran."""
    return lambda *grads: log.append(what)


# -- what a hook gets and what it may return ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("result", "found"),
    [
        ((), "expected None or a tuple of 1, got 0 values"),
        ([torch.ones(3)] * 2, "expected None or a tuple of 1, got 2 values"),
        ("ab", "expected None or a tuple of 1, got a str"),
        ((1.0,), "entry 0 is a float, not a tensor"),
        (torch.ones(2), r"entry 0 is \(2,\), torch.float32, on cpu, the gradient is \(3,\)"),
        ((torch.ones(3, dtype=torch.float64),), "torch.float64"),
    ],
    ids=["empty", "too many", "str", "float", "shape", "dtype"],
)
def test_a_return_value_that_does_not_fit_is_an_error_that_names_hook_and_node(
    kind: str, result: Any, found: str
) -> None:
    """An observer may return anything."""
    x = leaf()
    y = x.neg()
    with hl.attach_node(y, lambda *grads: result, on=kind, observe=True):
        y.sum().backward()
    hl.attach_node(y, lambda *grads: result, on=kind)
    with pytest.raises(hl.errors.HookReturnError, match=rf"node_{kind} hook '.*<lambda>' on 'NegBackward0': .*{found}"):
        y.sum().backward()


def test_a_gradient_that_did_not_come_cannot_be_given() -> None:
    """Here that of a constant."""
    z = leaf() * torch.ones(3)
    hl.attach_node(z, lambda grad_inputs, grad_outputs: (grad_inputs[0], torch.ones(3)), on="post")
    with pytest.raises(hl.errors.HookReturnError, match=r"entry 1 .*None"):
        z.sum().backward()


# -- what stands for a node --------------------------------------------------------------------------------------


def test_a_node_may_be_given_as_an_edge_or_a_tensor() -> None:
    """They all lead to the same place, in the order of attaching."""
    x = leaf()
    y = x * 2
    log: list[Any] = []
    for index, what in enumerate((y.grad_fn, get_gradient_edge(y), y)):
        hl.attach_node(what, logging(log, index))
    y.sum().backward()
    assert log == [0, 1, 2]


def test_a_node_of_the_users_own_operation_takes_hooks() -> None:
    """torch.autograd.Function makes nodes like any other."""
    x = leaf()
    y = Doubles.apply(x)
    log: list[Any] = []
    for kind in KINDS:
        hl.attach_node(y, logging(log, kind), on=kind)
    y.sum().backward()
    assert log == ["pre", "post"]


@pytest.mark.parametrize("given", [None, 3, "node", nn.Linear(1, 1), [None]], ids=repr)
def test_what_is_no_node_is_refused_with_what_to_pass(given: Any) -> None:
    """None is what a tensor that was not computed has for a grad_fn."""
    with pytest.raises(hl.errors.UnhookableError, match=r"takes a node.*pass the grad_fn of a tensor"):
        hl.attach_node(given, ignore)


def test_a_tensor_that_needs_no_gradient_has_no_node() -> None:
    """The message says so."""
    with pytest.raises(hl.errors.UnhookableError, match=r"tensor \(2,\) needs no gradient, so it has no node"):
        hl.attach_node(torch.ones(2), ignore)


# -- freed -------------------------------------------------------------------------------------------------------


class Token:
    """Something a hook holds."""


@pytest.fixture
def no_collector():
    """Nothing but reference counts frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def hook_holding(token: Token) -> Any:
    def hook(*grads: Any) -> None:
        token

    return hook


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backward", [False, True], ids=["dropped", "run"])
@pytest.mark.parametrize("removed", [False, True], ids=["on", "removed"])
@pytest.mark.usefixtures("no_collector")
def test_graph_and_hook_go_without_the_collector(kind: str, backward: bool, removed: bool) -> None:
    """Whether the graph was run or not, the hook removed or not."""
    x, token = leaf(), Token()
    y = x.sin()
    handle = hl.attach_node(y.grad_fn, hook_holding(token), on=kind)
    loss = y.exp().sum()
    if backward:
        loss.backward()
    if removed:
        handle.remove()
    references = [weakref.ref(one) for one in (x, y, token)]
    del x, y, token, handle, loss
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.usefixtures("no_collector")
def test_a_hooked_leaf_stays_until_the_hook_is_removed_and_no_longer() -> None:
    """With two hooks, until both are."""
    x = leaf()
    reference = weakref.ref(x)
    held = set(nodes._HELD)  # by other tests
    handles = [hl.attach_node(x, ignore, on=kind) for kind in ("pre", "pre", "post")]
    assert set(nodes._HELD) > held
    del x
    for handle in handles:
        assert reference() is not None
        handle.remove()
    assert reference() is None
    assert set(nodes._HELD) == held
