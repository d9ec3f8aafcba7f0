"""Hooks on functions: what they are handed, what they may return, how they come and go."""

from __future__ import annotations

import gc
import pickle
import weakref
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


# -- the four kinds, on every level ------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("scoped", [True, False], ids=["within", "bare"])
def test_the_four_kinds_fire_once_in_order_with_the_tensors_of_the_call(level: str, scoped: bool) -> None:
    """(fn, inputs), (fn, inputs, outputs), (fn, grad_outputs), (fn, grad_inputs, grad_outputs), each once."""
    target, run, name = LEVELS[level]
    model, (a, b) = Around(run), matrices()
    seen: list[tuple[str, Any, tuple[Any, ...]]] = []
    handles = hl.HandleSet(
        hl.attach_function(
            target,
            lambda fn, *tensors, kind=kind: seen.append((kind, fn, tensors)),
            on=kind,
            within=model if scoped else None,
        )
        for kind in KINDS
    )
    with handles:
        output = model(a, b)
        output.backward(torch.ones(3, 3))
    assert [kind for kind, _, _ in seen] == list(KINDS)
    assert {fn.name for _, fn, _ in seen} == {name}
    assert all(isinstance(fn, hl.sites.FunctionSite) for _, fn, _ in seen)
    (inputs,), (inputs_again, outputs), (grad_outputs,), (grad_inputs, grad_outputs_again) = (
        tensors for _, _, tensors in seen
    )
    for tensors in (inputs, inputs_again, outputs, grad_outputs, grad_inputs, grad_outputs_again):
        assert type(tensors) is tuple
    assert [torch.equal(one, other) for one, other in zip(inputs, (a, b), strict=True)] == [True, True]
    assert torch.equal(outputs[0], output)
    assert torch.equal(grad_outputs[0], torch.ones(3, 3))
    reference = [tensor.detach().clone().requires_grad_() for tensor in (a, b)]
    run(*reference).backward(torch.ones(3, 3))
    for got, leaf, mine in zip(grad_inputs, reference, (a, b), strict=True):
        assert torch.equal(got, leaf.grad)
        assert torch.equal(mine.grad, leaf.grad)
    assert [handle.report().fired for handle in handles] == [1, 1, 1, 1]


@levels
@kinds
def test_a_site_is_handed_over_where_it_is_declared(level: str, kind: str) -> None:
    """Name, kind, call and step, as for modules; its module is the one that made the call."""
    target, run, name = LEVELS[level]
    model, seen = nn.Sequential(nn.Identity(), Around(lambda x: run(x, x.detach()))), []

    def hook(fn: Any, *tensors: Any, site: Any) -> None:
        seen.append((site.name, site.kind, site.call, site.step, site.module))

    with hl.attach_function(target, hook, on=kind, within=model):
        for _ in range(2):
            model(fresh(3, 3)).sum().backward()
    assert seen == [(name, kind, 0, step, model[1]) for step in range(2)]


@levels
def test_without_grad_the_forward_kinds_fire_alone(level: str) -> None:
    """Under no_grad, and in inference mode, and no later backward fires anything."""
    target, run, _ = LEVELS[level]
    events: list[str] = []
    with hl.HandleSet(hl.attach_function(target, noting(events, kind), on=kind) for kind in KINDS):
        a, b = matrices()
        with torch.no_grad():
            run(a, b)
        assert events == ["forward_pre", "forward"]
        with torch.inference_mode():
            run(torch.ones(3, 3), torch.ones(3, 3))
        assert events == ["forward_pre", "forward"] * 2
        (a.exp() + b).sum().backward()
    assert events == ["forward_pre", "forward"] * 2


@levels
def test_inputs_that_need_no_gradient_have_none(level: str) -> None:
    """A place of its own for every tensor, with None where no gradient goes; and nothing fires if none needs one."""
    target, run, _ = LEVELS[level]
    seen: list[Any] = []
    with hl.attach_function(target, lambda fn, gi, go: seen.append(gi), on="backward"):
        run(fresh(3, 3), fresh(3, 3, seed=1, requires_grad=False)).sum().backward()
        run(fresh(3, 3, requires_grad=False), fresh(3, 3, requires_grad=False))
    assert [[grad is None for grad in grads] for grads in seen] == [[False, True]]


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


def test_outputs_without_tensors_are_an_empty_tuple() -> None:
    """x.tolist(), x.size() and torch.equal return no tensor; their hooks fire all the same."""
    seen: list[tuple[str, int, int]] = []
    functions = [torch.Tensor.tolist, torch.Tensor.size, torch.equal, torch.Tensor.item]
    x = torch.ones(1)
    with hl.attach_function(functions, lambda fn, i, o: seen.append((fn.name.rpartition(".")[2], len(i), len(o)))):
        assert x.tolist() == [1.0]
        assert x.size() == (1,)
        assert torch.equal(x, x)
        assert x.item() == 1.0
    assert seen == [("tolist", 1, 0), ("size", 1, 0), ("equal", 2, 0), ("item", 1, 0)]


def test_arguments_are_there_as_given_for_forward_hooks_alone() -> None:
    """fn.args and fn.kwargs during the call; gone afterwards, so that what keeps fn does not keep the tensors."""
    a, b = matrices()
    during, kept = [], []

    def note(fn: Any, *tensors: Any) -> None:
        during.append((fn.args, dict(fn.kwargs)))
        kept.append(fn)

    with (
        hl.attach_function(torch.add, note, on="forward_pre"),
        hl.attach_function(torch.add, note, on="forward"),
        hl.attach_function(torch.add, note, on="backward"),
    ):
        torch.add(a, b, alpha=2).sum().backward()
    assert [(args[0] is a, args[1] is b, kwargs) for args, kwargs in during[:2]] == [(True, True, {"alpha": 2})] * 2
    assert during[2] == ((), {})
    assert [(fn.args, fn.kwargs) for fn in kept] == [((), {})] * 3


def test_a_kept_site_keeps_no_tensor_alive() -> None:
    """Neither inputs nor outputs hang on a FunctionSite that outlives the call."""
    kept: list[Any] = []
    with hl.attach_function(torch.exp, lambda fn, i, o: kept.append(fn)):
        x = torch.ones(3)
        reference = weakref.ref(x)
        torch.exp(x)
        del x
    gc.collect()
    assert len(kept) == 1
    assert reference() is None


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
@kinds
def test_outside_of_modules_there_is_no_module(level: str, kind: str) -> None:
    """fn.module and fn.owner are None, and the step is that of no model."""
    target, run, name = LEVELS[level]
    seen: list[Any] = []
    with hl.attach_function(target, lambda fn, *_: seen.append((fn.name, fn.module, fn.owner, fn.step)), on=kind):
        run(*matrices()).sum().backward()
    assert seen == [(name, None, None, -1)]


def test_the_root_of_the_model_is_the_empty_name() -> None:
    """A call in the forward of the model itself."""
    model, seen = Around(torch.exp), []
    with hl.attach_function(torch.exp, lambda fn, i, o: seen.append((fn.module, fn.owner)), within=model):
        model(torch.ones(2))
    assert seen == [("", model)]


@levels
def test_the_module_is_known_for_every_level(level: str) -> None:
    """Operators and classes say where they were called too, in forward and backward kinds."""
    target, run, _ = LEVELS[level]
    model = nn.Sequential(nn.Identity(), nn.Sequential(Around(lambda x: run(x, x.detach()))))
    seen: list[Any] = []
    with hl.HandleSet(hl.attach_function(target, lambda fn, *_: seen.append(fn.module), on=kind) for kind in KINDS):
        model(fresh(3, 3)).sum().backward()
    assert seen == ["1.0"] * 4


def test_a_name_is_relative_to_the_model_given_as_within() -> None:
    """Also where that is a part of the model that runs; without it, to the outermost module that runs."""
    model, inner, outer = blocks(), [], []
    with (
        hl.attach_function("*.softmax", lambda fn, i, o: inner.append(fn.module), within=model[1]),
        hl.attach_function("aten._softmax", lambda fn, i, o: outer.append(fn.module)),
    ):
        model(fresh(2, 3))
    assert inner == ["attention", ""]
    assert outer == ["0.attention", "0", "1.attention", "1"]


def test_two_hooks_on_one_function_each_have_names_in_their_own_model() -> None:
    """A hook within a part and a hook within the whole, on the same calls."""
    model, of_part, of_whole = blocks(), [], []
    with (
        hl.attach_function("*.softmax", lambda fn, i, o: of_part.append(fn.module), within=model[1]),
        hl.attach_function("*.softmax", lambda fn, i, o: of_whole.append(fn.module), within=model),
    ):
        model(fresh(2, 3))
    assert of_whole == ["0.attention", "0", "1.attention", "1"]
    assert of_part == ["attention", ""]


@kinds
def test_calls_are_numbered_anew_in_each_forward(kind: str) -> None:
    """0, 1, 2 within one forward of the model; the step tells forwards apart."""
    model, seen = Around(lambda x: torch.exp(torch.exp(torch.exp(x)))), []
    with hl.attach_function(torch.exp, lambda fn, *_: seen.append((fn.step, fn.call)), on=kind, within=model):
        for _ in range(2):
            model(fresh(2) * 0.1).sum().backward()
    order = [0, 1, 2] if kind.startswith("forward") else [2, 1, 0]
    assert seen == [(step, call) for step in range(2) for call in order]


def test_calls_are_counted_per_function() -> None:
    """Each function of a glob has its own numbers."""
    model, seen = Around(lambda x: torch.relu(torch.exp(torch.relu(x)))), []
    with hl.attach_function(
        ["torch.exp", "torch.relu"], lambda fn, i, o: seen.append((fn.name, fn.call)), within=model
    ):
        model(torch.ones(2))
    assert seen == [("torch.relu", 0), ("torch.exp", 0), ("torch.relu", 1)]


def test_two_kinds_on_one_call_see_the_same_number() -> None:
    """A call is counted once, however many hooks it has."""
    model, seen = Around(lambda x: torch.exp(torch.exp(x))), []
    handles = [
        hl.attach_function(torch.exp, lambda fn, *_, kind=kind: seen.append((kind, fn.call)), on=kind, within=model)
        for kind in ("forward_pre", "forward", "forward")
    ]
    with hl.HandleSet(handles):
        model(torch.ones(2))
    assert seen == [(kind, call) for call in range(2) for kind in ("forward_pre", "forward", "forward")]


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


def test_a_function_that_the_model_calls_through_forward_counts_only_with_the_model() -> None:
    """model.forward(x) is no call of the model, here as for module hooks."""
    model, events = Around(torch.exp), []
    with hl.attach_function(torch.exp, noting(events, "hook"), within=model):
        model.forward(torch.ones(1))
        assert events == []
        model(torch.ones(1))
    assert events == ["hook"]


def test_find_and_copies_know_nothing_of_function_hooks_on_a_model() -> None:
    """A copy or a pickle of the model carries no hooks, and calls in it are not counted."""
    model, events = blocks(), []
    model[0].attention, model[1].attention = nn.Softmax(-1), nn.Softmax(-1)
    with hl.attach_function("*.softmax", noting(events, "hook"), within=model):
        import copy

        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        twin(fresh(2, 3))
        thawed(fresh(2, 3))
        assert events == []
        model(fresh(2, 3))
        assert len(events) == 4
    for copied in (twin, thawed):
        assert "_call_impl" not in vars(copied)
    assert "_call_impl" not in vars(model)
