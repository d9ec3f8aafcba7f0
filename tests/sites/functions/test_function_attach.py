"""Hooks on functions: what they are handed, what they may return, how they come and go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, LEVELS, Around, fresh, matrices, noting
from torch import Tensor, nn

import hookline as hl

levels = pytest.mark.parametrize("level", LEVELS)
kinds = pytest.mark.parametrize("kind", KINDS)


# -- inputs and outputs ------------------------------------------------------------------------------------


def test_lists_tuples_and_keywords_are_flattened_in_order() -> None:
    """Every tensor of the call, whatever it came in; numbers, strings and None are none."""
    a, b, c = (fresh(2, 2, seed=seed) for seed in range(3))
    cases = [
        (torch.cat, lambda: torch.cat([a, b, c], 1), [a, b, c]),
        (torch.stack, lambda: torch.stack(tensors=(c, a), dim=0), [c, a]),
        (torch.where, lambda: torch.where(a > 0, b, c), [None, b, c]),
        (F.linear, lambda: F.linear(a, weight=b, bias=None), [a, b]),
        (F.linear, lambda: F.linear(bias=c, input=a, weight=b), [c, a, b]),
        (torch.einsum, lambda: torch.einsum("ij,jk->ik", a, b), [a, b]),
        (torch.block_diag, lambda: torch.block_diag(a, b, c), [a, b, c]),
        (torch.Tensor.__getitem__, lambda: a[torch.tensor([0]), :], [a, None]),
        (torch.zeros, lambda: torch.zeros(3), []),
        (torch.broadcast_tensors, lambda: torch.broadcast_tensors(a, b), [a, b]),
    ]
    for function, run, expected in cases:
        seen: list[Any] = []
        with hl.attach_function(function, lambda fn, inputs, seen=seen: seen.append(inputs), on="forward_pre"):
            run()
        [inputs] = seen
        assert len(inputs) == len(expected), function
        for got, wanted in zip(inputs, expected, strict=True):
            assert wanted is None or got is wanted, function


def test_outputs_are_flattened_and_the_caller_gets_the_structure_it_expects() -> None:
    """A named tuple stays one, nested tuples stay nested, a list stays a list."""
    x, seen = fresh(4, 3), []

    def note(fn: Any, inputs: Any, outputs: Any) -> Any:
        seen.append(len(outputs))
        return tuple(output.clone() if output.is_floating_point() else output for output in outputs)

    with hl.attach_function([torch.max, torch.lstm, torch.Tensor.split, torch.Tensor.unbind, torch.topk], note):
        values, indices = torch.max(x, 1)
        result = torch.max(x, dim=1)
        output, (h, c) = nn.LSTM(3, 2)(x)
        pieces = x.split(2)
        rows = x.unbind()
        top = torch.topk(x, 2)
    assert seen == [2, 2, 3, 2, 4, 2]
    assert torch.equal(values, result.values)
    assert torch.equal(indices, result.indices)
    assert type(result) is torch.return_types.max
    assert type(top) is torch.return_types.topk
    assert output.shape == (4, 2)
    assert h.shape == c.shape == (1, 2)
    assert type(pieces) is type(x.split(2))
    assert [piece.shape for piece in pieces] == [(2, 3), (2, 3)]
    assert len(rows) == 4


# -- where and when ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Around(lambda x: F.softmax(x, -1)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mlp(self.attention(x))) + F.softmax(x, -1)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@kinds
@pytest.mark.parametrize("scoped", [True, False], ids=["within", "bare"])
def test_fn_says_in_which_module_the_call_was_made(kind: str, scoped: bool) -> None:
    """The dotted path in the model that runs, in every kind, in the hook and when asked after everything is over."""
    model, during, kept = blocks(), [], []

    def note(fn: Any, *tensors: Any) -> None:
        during.append(fn.module)
        kept.append(fn)

    with hl.attach_function("torch.nn.functional.softmax", note, on=kind, within=model if scoped else None):
        model(fresh(2, 3)).sum().backward()
    assert Counter(during) == {"0.attention": 1, "0": 1, "1.attention": 1, "1": 1}
    assert [fn.module for fn in kept] == during
    assert [fn.owner for fn in kept] == [model.get_submodule(name) for name in during]
    if kind.startswith("forward"):
        assert during == ["0.attention", "0", "1.attention", "1"]


@levels
def test_within_counts_only_the_forwards_of_that_model(level: str) -> None:
    """Calls outside of it, or in another model, do not count."""
    target, run, _ = LEVELS[level]
    model, other, events = Around(run), Around(run), []
    with hl.attach_function(target, noting(events, "hook"), within=model):
        run(*matrices())
        other(*matrices())
        assert events == []
        model(*matrices())
        assert events == ["hook"]
        other(*matrices())
    assert events == ["hook"]
