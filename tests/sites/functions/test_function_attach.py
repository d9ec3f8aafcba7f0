"""Hooks on functions: what they are handed, what they may return, how they come and go."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_functions import KINDS, LEVELS, Around, Pair, Scale, fresh, label, modes, noting, sin_product
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookline as hl

levels = pytest.mark.parametrize("level", LEVELS)
kinds = pytest.mark.parametrize("kind", KINDS)


def matrices() -> tuple[Tensor, Tensor]:
    return fresh(3, 3, seed=1), fresh(3, 3, seed=2)


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


@pytest.mark.parametrize("kind", ["forward_pre", "forward"])
def test_edits_on_operators_and_classes_flow_into_the_graph(kind: str) -> None:
    """The same on the levels below and beside functions."""
    a, b = matrices()
    for target, run in (
        ("aten.atan2.default", torch.atan2),
        (sin_product, lambda a, b: sin_product(a, b)),
        (Scale, lambda a, b: Scale.apply(a, 2.0)),
    ):
        takes_two = target is not Scale

        def hook(fn: Any, *tensors: Any) -> Any:
            return tuple(tensor * 3 for tensor in tensors[-1])

        leaves = [tensor.detach().clone().requires_grad_() for tensor in (a, b)]
        with hl.attach_function(target, hook, on=kind):
            output = run(*leaves)
            output.sum().backward()
        reference = [tensor.detach().clone().requires_grad_() for tensor in (a, b)]
        factor = 3 if kind == "forward_pre" else 1
        expected = run(*(tensor * factor for tensor in reference)) * (3 if kind == "forward" else 1)
        expected.sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(leaves[0].grad, reference[0].grad)
        if takes_two:
            torch.testing.assert_close(leaves[1].grad, reference[1].grad)


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
        ("forward_pre", (torch.ones(3, 3),), "a tuple of 2 tensors, as it was shown, but got 1 values"),
        ("forward_pre", torch.ones(3, 3), "a tuple of 2 tensors, as it was shown, but got a Tensor"),
        ("forward_pre", "junk", "got a str"),
        ("forward_pre", (torch.ones(3, 3), 3), "a tuple of 2 tensors"),
        ("forward", (), "must return None or a tensor, as it was shown, but got 0 values"),
        ("forward", (None,), "must return None or a tensor, as it was shown, but got a tuple with None at 0"),
        ("forward", 3.0, "got a float"),
        ("forward", {"a": 1}, "got a dict"),
        ("backward_pre", (torch.ones(3, 3),) * 2, "expected a tuple of 1"),
        ("backward_pre", torch.ones(2), "shape"),
        ("backward", torch.ones(3, 3), "expected a tuple of 2"),
        ("backward", (torch.ones(3, 3), torch.ones(1)), "shape"),
        ("backward", "junk", "got a str"),
    ],
)
@pytest.mark.parametrize("level", ["function", "operator", "custom operator"])
def test_a_return_value_that_cannot_stand_in_is_an_error(level: str, kind: str, returned: Any, says: str) -> None:
    """It names hook, kind and function, and leaves the function as it was."""
    target, run, name = LEVELS[level]

    def wrong(fn: Any, *tensors: Any) -> Any:
        return returned

    with (
        hl.attach_function(target, wrong, on=kind),
        pytest.raises(hl.errors.HookReturnError) as raised,
    ):
        run(*matrices()).sum().backward()
    assert says in str(raised.value)
    assert name in str(raised.value)
    assert "wrong" in str(raised.value)
    run(*matrices()).sum().backward()


# -- coming and going --------------------------------------------------------------------------------------


@levels
@kinds
def test_a_hook_that_removes_itself_and_is_the_only_one_leaves_nothing(level: str, kind: str) -> None:
    """Its kernels or class go too, although they are in use; a mode, which torch holds, is empty, and the next's."""
    target, run, _ = LEVELS[level]
    events: list[str] = []
    before = modes()

    def once(fn: Any, *tensors: Any) -> None:
        events.append("once")
        handle.remove()

    handle = hl.attach_function(target, once, on=kind)
    for _ in range(2):
        run(*matrices()).sum().backward()
    assert events == ["once"]
    left = [mode for mode in modes() if mode not in before]
    assert [mode.table for mode in left] == [{}] * (level == "function")
    hl.attach_function(torch.exp, lambda fn, i, o: None).remove()
    assert modes() == before


@kinds
def test_a_hook_may_put_a_hook_on_another_function(kind: str) -> None:
    """From inside a hook; it counts from then on."""
    events: list[str] = []
    added: list[hl.HookHandle] = []

    def adder(fn: Any, *tensors: Any) -> None:
        if not added:
            added.append(hl.attach_function(torch.sin, noting(events, "sin"), on="forward"))

    x = fresh(2)
    with hl.attach_function(torch.exp, adder, on=kind):
        torch.exp(x).sum().backward()
        torch.sin(x)
    assert events == ["sin"]
    added[0].remove()
    torch.sin(x)
    assert events == ["sin"]


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.product(
    level=list(LEVELS), kind=KINDS, error=[ValueError, KeyboardInterrupt], scoped={"within": True, "bare": False}
)
def test_an_error_in_a_hook_comes_out_as_it_is_and_leaves_all_in_order(
    level: str, kind: str, error: type[BaseException], scoped: bool
) -> None:
    """The error itself, no mode left on the stack, and the next call runs hooks as ever."""
    target, run, _ = LEVELS[level]
    model, events, failing = Around(run), [], [True]

    def hook(fn: Any, *tensors: Any) -> None:
        if failing:
            raise error("mine")
        events.append("fired")

    with hl.attach_function(target, hook, on=kind, within=model if scoped else None):
        depth = len(modes())
        with pytest.raises(error, match="mine"):
            model(*matrices()).sum().backward()
        assert len(modes()) == depth
        failing.clear()
        model(*matrices()).sum().backward()
    assert events == ["fired"]


@pytest.mark.product(level=list(LEVELS), kind=KINDS, scoped={"within": True, "bare": False})
def test_an_error_in_the_function_itself_comes_out_as_it_is(level: str, kind: str, scoped: bool) -> None:
    """The same error as without hooks, and hooks go on afterwards."""
    target, run, _ = LEVELS[level]
    model, events = Around(run), []
    bad = torch.ones(3, 3), torch.ones(5, 5)
    with pytest.raises(RuntimeError) as plain:
        model(*bad)
    with hl.attach_function(target, noting(events, "fired"), on=kind, within=model if scoped else None):
        depth = len(modes())
        with pytest.raises(RuntimeError) as hooked:
            model(*bad)
        assert str(hooked.value) == str(plain.value)
        assert len(modes()) == depth
        events.clear()
        model(*matrices()).sum().backward()
    assert events == ["fired"]


# -- functions inside functions ----------------------------------------------------------------------------


def test_functions_inside_a_function_are_its_own_affair() -> None:
    """Of nn.ReLU, F.relu shows and the torch.relu in it does not; its operator does."""
    events: list[str] = []
    with hl.attach_function("*.relu", lambda fn, i, o: events.append(fn.name)):
        nn.ReLU()(torch.ones(2))
    assert events == ["torch.nn.functional.relu"]
    with hl.attach_function("aten.relu", lambda fn, i, o: events.append(fn.name)):
        nn.ReLU()(torch.ones(2))
    assert events == ["torch.nn.functional.relu", "aten.relu.default"]


@kinds
@levels
def test_functions_that_a_hook_calls_are_not_seen(level: str, kind: str) -> None:
    """A hook that calls the very function it is on does not call itself."""
    target, run, _ = LEVELS[level]
    events: list[int] = []

    def hook(fn: Any, *tensors: Any) -> None:
        events.append(1)
        assert len(events) < 5
        run(*matrices())

    with hl.attach_function(target, hook, on=kind):
        run(*matrices()).sum().backward()
    assert events == [1]


@pytest.mark.parametrize("scoped", [True, False], ids=["within", "bare"])
def test_a_star_fires_as_often_as_torch_shows_functions(scoped: bool) -> None:
    """Counted independently by a mode of the test's own, over a model with attention, an LSTM and operators."""
    torch.manual_seed(0)
    attention, lstm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LSTM(4, 4, batch_first=True)

    def run(x: Tensor) -> Tensor:
        h = attention(x, x, x)[0] + x @ torch.ones(4, 4)
        h = lstm(h)[0][:, -1] * 2 - 1
        h[0] = 1.0
        return torch.einsum("ij,ij->i", h, F.layer_norm(h, (4,))).sum() / (1 + h.abs().max())

    shown: Counter[Any] = Counter()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") != "__get__":
                shown[func] += 1
            return func(*args, **(kwargs or {}))

    model, fired = Around(run), Counter()
    x = fresh(2, 3, 4, requires_grad=False)
    with Mode():
        model(x)
    with hl.attach_function("*", lambda fn, i, o: fired.update([fn.func]), within=model if scoped else None):
        model(x)
    assert fired == shown
    assert sum(fired.values()) > 15


# -- receipts ----------------------------------------------------------------------------------------------


@levels
@kinds
def test_the_receipt_counts(level: str, kind: str) -> None:
    """Matched, attached, fired, the step it last fired in, and what it cost."""
    target, run, name = LEVELS[level]
    model = Around(run)
    with hl.attach_function(target, lambda fn, *_: None, on=kind, within=model, profile=True, name="mine") as handle:
        for _ in range(3):
            model(*matrices()).sum().backward()
        report = handle.report()
    assert (report.name, report.kind, report.matched, report.attached, report.fired) == ("mine", kind, 1, 1, 3)
    assert report.last_step == 2
    assert report.cost_us is not None
    assert [site.name for site in report.sites] == [name] == list(handle.names)
    assert handle.report().attached == 0
    assert name in repr(handle)


def test_a_hook_that_never_fired_although_the_model_ran_says_so_and_why() -> None:
    """Once, on removal, with a remedy; a glob of which some fired says nothing."""
    model = Around(lambda x: torch.relu(x))
    handle = hl.attach_function(F.relu, lambda fn, i, o: None, within=model)
    model(torch.ones(2))
    with pytest.warns(hl.errors.HookNeverFired, match=r"'\*\.relu' takes all spellings"):
        handle.remove()
    handle = hl.attach_function("aten.mm.default", lambda fn, i, o: None, within=model)
    model(torch.ones(2))
    with pytest.warns(hl.errors.HookNeverFired, match="operator never ran"):
        handle.remove()
    handle = hl.attach_function(Pair, lambda fn, i, o: None, within=model)
    model(torch.ones(2))
    with pytest.warns(hl.errors.HookNeverFired, match="not applied|never called"):
        handle.remove()


@pytest.mark.parametrize("target", ["*.relu", "aten.relu.default", Pair], ids=label)
@pytest.mark.parametrize("run", [lambda model, x: model.forward(x), lambda model, x: model[1](model[0](x))])
def test_a_model_that_is_passed_by_is_said_to_be(run: Any, target: Any) -> None:
    """within= counts what model(x) calls; its forward, or a part of it, called by themselves begin no step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    handle = hl.attach_function(target, lambda fn, i, o: None, within=model)
    run(model, torch.ones(1, 2))
    assert handle.report().fired == 0
    with pytest.warns(
        hl.errors.HookNeverFired, match="the model itself was not called: within= counts what model"
    ) as warned:
        handle.remove()
    assert "although the model ran" not in str(warned[0].message)


def test_the_advice_does_not_recommend_what_was_done() -> None:
    """All spellings of a function are hooked already; and without a model there is none that ran."""
    handle = hl.attach_function("*.gelu", lambda fn, i, o: None)
    torch.exp(torch.ones(1))
    with pytest.warns(hl.errors.HookNeverFired, match="it may be called inside another function") as warned:
        handle.remove()
    assert "spellings" not in str(warned[0].message)
    assert "model" not in str(warned[0].message)


@pytest.mark.filterwarnings("error::hookline.errors.HookNeverFired")
def test_no_complaint_where_nothing_ran_or_something_fired() -> None:
    """A glob of which a few fired, a model that did not run, a handle left by an error: silence."""
    model = Around(torch.relu)
    with hl.attach_function("torch.*", lambda fn, i, o: None, within=model):
        model(torch.ones(2))
    hl.attach_function(F.relu, lambda fn, i, o: None, within=model).remove()
    hl.attach_function(F.relu, lambda fn, i, o: None).remove()
    with pytest.raises(RuntimeError), hl.attach_function(F.relu, lambda fn, i, o: None, within=model):
        torch.mm(model(torch.ones(2, 2)), torch.ones(3, 3))


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


def test_the_model_is_not_kept_alive_by_the_hook() -> None:
    """Neither by the handle nor by the mode; the handle may be removed after it is gone."""
    model = Around(torch.exp)
    handle = hl.attach_function(torch.exp, lambda fn, i, o: None, within=model)
    model(torch.ones(2))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    handle.remove()


def test_a_hook_put_on_in_a_thread_that_is_over_comes_off() -> None:
    """Its mode went with the thread."""
    handles: list[hl.HookHandle] = []
    thread = threading.Thread(target=lambda: handles.append(hl.attach_function(torch.exp, lambda fn, i, o: None)))
    thread.start()
    thread.join()
    torch.exp(torch.ones(1))
    assert handles[0].report().fired == 0
    handles[0].remove()
