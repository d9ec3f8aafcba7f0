"""Hooks on functions that edit, remove themselves or raise; functions inside functions; receipts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, LEVELS, Around, fresh, kinds_of, matrices
from torch import Tensor, nn

import hookline as hl

levels = pytest.mark.parametrize("level", LEVELS)
kinds = pytest.mark.parametrize("kind", KINDS)


# -- edits -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two linear maps with a relu between, by hand, with room for edits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))
        self.before = self.after = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.a)
        h = self.after(F.gelu(self.before(h)))
        return F.linear(h, self.b)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
@pytest.mark.parametrize("returned", ["tensor", "tuple", "list"])
def test_an_edit_is_what_the_run_goes_on_with_and_gradients_flow_through_it(kind: str, returned: str) -> None:
    """The same output and gradients as a model that has the edit written into it."""
    model, written, x = Net(), Net(), fresh(5, 3)

    def edit(h: Tensor) -> Tensor:
        return h * 3 + h.sin()

    setattr(written, "before" if kind == "forward_pre" else "after", edit)
    shape = {"tensor": lambda t: t, "tuple": lambda t: (t,), "list": lambda t: [t]}[returned]

    def hook(fn: Any, inputs: Any, outputs: Any = None) -> Any:
        return shape(edit((inputs if outputs is None else outputs)[0]))

    plain = gradients(model, x)
    with hl.attach_function(F.gelu, hook, on=kind, within=model):
        edited = gradients(model, x)
    assert all(map(torch.equal, edited, gradients(written, x)))
    assert not torch.equal(edited[0], plain[0])
    assert all(map(torch.equal, gradients(model, x), plain))


def test_edits_of_inputs_reach_into_lists_and_keywords_without_changing_the_callers() -> None:
    """The function gets a list with the new tensors, the caller's list stays as it was."""
    pieces = [torch.ones(1), torch.zeros(1)]
    with hl.attach_function([torch.cat, torch.stack], lambda fn, inputs: [t + 1 for t in inputs], on="forward_pre"):
        assert torch.cat(pieces).tolist() == [2.0, 1.0]
        assert torch.cat(tensors=pieces, dim=0).tolist() == [2.0, 1.0]
        assert torch.stack(tuple(pieces)).tolist() == [[2.0], [1.0]]
    assert [piece.tolist() for piece in pieces] == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("kind", "returned", "says"),
    [
        ("forward_pre", (torch.ones(3, 3),), "a tuple of 2 tensors"),
        ("forward_pre", torch.ones(3, 3), "got a Tensor"),
        ("forward_pre", (torch.ones(3, 3), 3), "got a tuple of (Tensor, int)"),
        ("forward", (), "got a tuple of ()"),
        ("forward", {"a": 1}, "got a dict"),
        ("backward_pre", (torch.ones(3, 3),) * 2, "tuple of 1, got 2"),
        ("backward_pre", torch.ones(2), "the gradient is"),
        ("backward", torch.ones(3, 3), "tuple of 2"),
        ("backward", (torch.ones(3, 3), torch.ones(1)), "the gradient is"),
        ("backward", "junk", "got a str"),
    ],
)
@pytest.mark.parametrize("level", ["function", "operator"])
def test_a_return_value_that_cannot_stand_in_is_an_error(level: str, kind: str, returned: Any, says: str) -> None:
    """It names hook, kind and function, and leaves the function as it was."""
    target, run, name = LEVELS[level]
    if kind not in kinds_of(level):
        pytest.skip("no such kind there")

    def wrong(fn: Any, *tensors: Any) -> Any:
        return returned

    with hl.attach_function(target, wrong, on=kind), pytest.raises(hl.errors.HookReturnError) as raised:
        run(*matrices()).sum().backward()
    assert says in str(raised.value)
    assert name in str(raised.value)
    assert "wrong" in str(raised.value)
    run(*matrices()).sum().backward()


# -- functions inside functions ----------------------------------------------------------------------------


@kinds
@levels
def test_functions_that_a_hook_calls_are_not_seen(level: str, kind: str) -> None:
    """A hook that calls the very function it is on does not call itself."""
    target, run, _ = LEVELS[level]
    if kind not in kinds_of(level):
        pytest.skip("no such kind there")
    events: list[int] = []

    def hook(fn: Any, *tensors: Any) -> None:
        events.append(1)
        assert len(events) < 5
        run(*matrices())

    with hl.attach_function(target, hook, on=kind):
        run(*matrices()).sum().backward()
    assert events == [1]


# -- receipts ----------------------------------------------------------------------------------------------


def test_a_hook_that_never_fired_although_the_model_ran_says_so_and_why() -> None:
    """Once, on removal, with a remedy; a glob of which some fired says nothing."""
    model = Around(lambda x: torch.relu(x))
    handle = hl.attach_function(F.relu, lambda fn, i, o: None, within=model)
    model(torch.ones(2))
    with pytest.warns(hl.errors.HookNeverFired, match=r"'\*\.relu' takes all spellings"):
        handle.remove()
    handle = hl.attach_function("aten.mm.default", lambda fn, i, o: None, within=model)
    model(torch.ones(2))
    with pytest.warns(hl.errors.HookNeverFired, match="come as another operator"):
        handle.remove()
