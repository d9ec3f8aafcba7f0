"""Hooks on custom ``autograd.Function`` classes: their ``apply`` is ours for a while, and theirs again."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers_functions import KINDS, Pair, Scale, fresh, label, noting
from torch import Tensor, nn

import hookline as hl
from hookline.sites import _torch

pair_apply = Pair.apply
"""A reference taken when the module was imported, as torch's own tutorials do: ``relu = MyReLU.apply``."""


class Shifted(Scale):
    """A subclass is another function."""


class Own(torch.autograd.Function):
    """With an ``apply`` of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2

    @classmethod
    def apply(cls, x: Tensor, plus: float = 0.0) -> Tensor:
        return super().apply(x) + plus


class InPlace(torch.autograd.Function):
    """Changes its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("cls", [Pair, Own, Shifted], ids=label)
def test_the_class_is_as_before_when_the_last_hook_is_gone(cls: Any) -> None:
    """Its ``apply``, inherited or its own, and its bases are the very same objects."""
    before = vars(cls).get("apply"), cls.__bases__, cls.__mro__
    first = hl.attach_function(cls, lambda fn, i, o: None)
    second = hl.attach_function(cls, lambda fn, *_: None, on="backward")
    assert (vars(cls).get("apply"), cls.__bases__, cls.__mro__) != before
    first.remove()
    second.remove()
    assert (vars(cls).get("apply"), cls.__bases__, cls.__mro__) == before


def test_a_class_whose_model_is_gone_is_as_before_when_the_next_hook_comes() -> None:
    """No hook has to come off for that."""
    before, model = Pair.__mro__, nn.Identity()
    hl.attach_function(Pair, lambda fn, inputs: None, on="forward_pre", within=model)
    assert Pair.__mro__ != before
    del model
    gc.collect()
    with hl.attach_function("torch.mm", lambda fn, inputs: None, on="forward_pre"):
        assert Pair.__mro__ == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_to_apply_taken_before_the_hook_fires_too(kind: str) -> None:
    """``pair = Pair.apply`` at the top of a file is how torch's documentation says to use a Function.

    From torch 2.14 on nothing of ours can be on the way of such a reference.
    """
    events: list[str] = []
    with hl.attach_function(Pair, noting(events, kind), on=kind):
        pair_apply(fresh(2), fresh(2))[0].sum().backward()
    assert events == ([kind] if _torch.APPLY_IS_PYTHON else [])


def test_a_function_that_changes_its_input() -> None:
    """mark_dirty: the input comes out as the output, and gradients are its own; to edit them is refused."""
    seen: list[Any] = []

    def watch(fn: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        seen.append((grad_inputs[0].tolist(), grad_outputs[0].tolist()))

    def edit(fn: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
        return grad_inputs

    x = torch.ones(2, requires_grad=True)
    handle = hl.attach_function(InPlace, edit, on="backward")
    with pytest.raises(RuntimeError):
        InPlace.apply(x * 1)
    handle.remove(quiet=True)
    with pytest.raises(hl.errors.KindError, match="changes the tensor itself"):
        hl.attach_function("torch.Tensor.add_", edit, on="backward")
    with hl.attach_function(InPlace, watch, on="backward"):
        h = x * 1
        y = InPlace.apply(h)
        (y * 5).sum().backward()
    assert y.tolist() == [2, 2]
    assert h.tolist() == [2, 2]
    assert seen == [([10, 10], [5, 5])]
    assert x.grad.tolist() == [10, 10]
