"""PyTorch: hooks on modules, functions and tensors under activation checkpointing."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch
from helpers_contract import EDITING, Cube
from helpers_models import Scale, assert_same_grads, leaf, logger, mlp, twin
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hookline as hl

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])


class Block(nn.Module):
    """Modules, a function of torch, an operator and a function of one's own, once each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return Cube.apply(self.drop(torch.tanh(self.linear(x))))


class Stack(nn.Module):
    """Two blocks, each of them checkpointed, or neither."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


COUNTED = {
    "module": lambda model, hook: hl.attach(model, "blocks.#", lambda m, args, out, *, site: hook(site)),
    "leaf module": lambda model, hook: hl.attach(model, nn.Linear, lambda m, args, out, *, site: hook(site)),
    "module pre": lambda model, hook: hl.attach(
        model, "blocks.#", lambda m, args, *, site: hook(site), on="forward_pre"
    ),
    "function": lambda model, hook: hl.attach_function(torch.tanh, lambda fn, i, o: hook(fn), within=model),
    "function pre": lambda model, hook: hl.attach_function(
        torch.tanh, lambda fn, i: hook(fn), within=model, on="forward_pre"
    ),
    "operator": lambda model, hook: hl.attach_function("aten.addmm", lambda fn, i, o: hook(fn), within=model),
    "operator anywhere": lambda model, hook: hl.attach_function("aten.addmm", lambda fn, i, o: hook(fn)),
    "own function anywhere": lambda model, hook: hl.attach_function(Cube, lambda fn, i, o: hook(fn)),
    "own function": lambda model, hook: hl.attach_function(Cube, lambda fn, i, o: hook(fn), within=model),
}


# -- activation checkpointing -----------------------------------------------------------------------------


@REENTRANT
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("put", COUNTED.values(), ids=COUNTED.keys())
def test_a_counter_that_leaves_recomputes_out_counts_each_logical_forward_once(put, use_reentrant):
    """Whatever of the repetition is seen is marked: what is not has the counts of the plain model.

    Under no_grad nothing is repeated, so nothing is marked.
    """
    counts = {}
    for mode in (None, use_reentrant):
        marks, model = [], Stack(mode)
        with put(model, lambda site, marks=marks: marks.append(site.recompute)):
            for _ in range(2):
                model(leaf(4, 3)).sum().backward()
            counts[mode] = Counter(marks)
            with torch.no_grad():
                model(leaf(4, 3))
        assert Counter(marks) - counts[mode] == {False: 2}
    assert counts[None] == {False: 4}
    assert counts[use_reentrant][False] == 4


@REENTRANT
@pytest.mark.parametrize("name", ["module", "leaf module", "module pre", "operator anywhere", "own function anywhere"])
def test_every_repetition_of_a_forward_is_seen_and_marked(name, use_reentrant):
    """Modules, operators and functions of one's own fire in the backward too; there, each repeats one call."""
    marks, model = [], Stack(use_reentrant)
    with COUNTED[name](model, lambda site: marks.append(site.recompute)):
        for _ in range(2):
            with set_checkpoint_early_stop(False):  # or the last module of a block need not finish
                model(leaf(4, 3)).sum().backward()
    assert marks == [False, False, True, True] * 2


@REENTRANT
def test_a_checkpoint_inside_a_checkpoint_marks_every_repetition(use_reentrant):
    """One logical call of the innermost module is unmarked, however often it is repeated."""
    marks, inner = [], nn.Linear(3, 3)
    middle = nn.Sequential(inner, nn.Tanh())

    def outer(x):
        return checkpoint(middle, x, use_reentrant=use_reentrant) * 2

    with hl.attach(inner, lambda m, args, out, *, site: marks.append(site.recompute)):
        checkpoint(outer, leaf(4, 3), use_reentrant=use_reentrant).sum().backward()
    assert marks.count(False) == 1
    assert marks.count(True) >= 1


def test_a_module_called_in_a_plain_backward_pass_is_no_recompute():
    """site.recompute says that checkpointing repeats a forward; a backward may call a module for the first time."""
    inner, marks = nn.Linear(2, 2), []

    class Learned(torch.autograd.Function):
        """Sends a gradient on that a network makes of it."""

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return inner(grad)

    with hl.attach(inner, lambda m, args, out, *, site: marks.append(site.recompute)):
        Learned.apply(leaf(2, 2)).sum().backward()
    assert marks == [False]


@REENTRANT
@pytest.mark.parametrize("target", [torch.tanh, Cube], ids=["function", "own function"])
def test_gradient_hooks_of_functions_in_a_checkpointed_model_fire_once_per_call_or_say_why_not(target, use_reentrant):
    """As often as in the plain model; if not, the warning on removal speaks of checkpointing."""
    fired = {}
    for mode in (None, use_reentrant):
        model, seen = Stack(mode), []
        handle = hl.attach_function(target, logger(seen, "fired"), on="backward", within=model, name="counter")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model(leaf(4, 3)).sum().backward()
            handle.remove()
        fired[mode] = len(seen)
    assert fired[None] == 2
    if fired[use_reentrant] != 2:
        assert any("checkpoint" in str(warning.message) for warning in told), [str(one.message) for one in told]


@REENTRANT
def test_tensor_hooks_put_on_inside_a_checkpointed_block_fire_once_per_backward(use_reentrant):
    """An activation's gradient is one, though the block that attaches runs twice, and it is the plain model's."""
    grads = {}
    for mode in (None, use_reentrant):
        torch.manual_seed(0)
        model, seen = Stack(mode).eval(), []

        def note(module, args, output, seen=seen):
            if output.requires_grad:
                hl.attach_tensor(output, lambda grad: seen.append(grad.clone()))

        with hl.attach(model, "blocks.#.linear", note):
            model(leaf(4, 3)).sum().backward()
        grads[mode] = seen
    assert len(grads[None]) == len(grads[use_reentrant]) == 2
    assert all(torch.equal(a, b) for a, b in zip(grads[None], grads[use_reentrant], strict=True))


@REENTRANT
def test_post_accumulate_hooks_fire_once_per_backward_under_checkpointing(use_reentrant):
    """With the gradients of the plain model, dropout included."""
    results = {}
    for mode in (None, use_reentrant):
        torch.manual_seed(0)
        model, seen = Stack(mode), {}
        names = {parameter: name for name, parameter in model.named_parameters()}

        def note(parameter, names=names, seen=seen):
            seen.setdefault(names[parameter], []).append(parameter.grad.clone())

        with hl.attach(model, "*", note, on="param_grad"):
            model(leaf(4, 3)).sum().backward()
        results[mode] = seen
    assert results[None].keys() == results[use_reentrant].keys()
    for name, (grad,) in results[None].items():
        (other,) = results[use_reentrant][name]
        assert torch.equal(grad, other), name


# -- modules ----------------------------------------------------------------------------------------------


@EDITING
@REENTRANT
def test_under_checkpointing_gradient_hooks_fire_once_with_the_right_gradients(use_reentrant, editing):
    """Backward hooks inside a checkpointed block fire once per backward, and all gradients stay the same."""
    model, x, seen = mlp(), leaf(4, 3), []
    reference, x_reference = copy.deepcopy(model), twin(x)

    def hook(module, grad_input, grad_output, *, site):
        grads = [parameter.grad.clone() for parameter in module.parameters()]
        seen.append((site.name, grad_input[0], grad_output[0], grads))
        return grad_input if editing else None

    hl.attach(model, "#", hook, on="backward")
    checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
    hidden = [x_reference]
    for layer in reference:
        hidden.append(layer(hidden[-1]))
        hidden[-1].retain_grad()
    hidden[-1].square().sum().backward()
    assert [name for name, *_ in seen] == ["2", "1", "0"]
    for name, grad_input, grad_output, grads in seen:
        assert torch.equal(grad_input, hidden[int(name)].grad), name
        assert torch.equal(grad_output, hidden[int(name) + 1].grad), name
        for grad, parameter in zip(grads, reference[int(name)].parameters(), strict=True):
            assert torch.equal(grad, parameter.grad), name
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)


@REENTRANT
def test_under_checkpointing_gradient_hooks_carry_the_index_of_the_logical_call(use_reentrant):
    """A block that is checkpointed twice in one forward meets its backward as call 1, then call 0.

    Reentrant checkpointing only builds a graph when it repeats the forward, and numbers the calls as it does.
    """
    calls, x = [], leaf(2)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Scale(2.0)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=use_reentrant)
            return x

    model = Twice()

    def hook(module, grad_input, grad_output, *, site):
        calls.append((site.step, site.call, grad_output[0].tolist()))

    hl.attach(model, "block", hook, on="backward")
    for _ in range(2):
        model(x).sum().backward()
    first, second = (0, 1) if use_reentrant else (1, 0)
    expected = [(first, [1.0, 1.0]), (second, [2.0, 2.0])]
    assert calls == [(step, *rest) for step in range(2) for rest in expected]


@REENTRANT
def test_a_checkpointed_model_counts_its_recompute_as_no_new_step(use_reentrant):
    """If the hooked model itself is checkpointed, its second forward belongs to the step of the first."""
    model, x, moments = mlp(), leaf(4, 3), []
    handle = hl.attach(model, "0", lambda m, args, out, *, site: moments.append((site.step, site.recompute)))
    for _ in range(2):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert moments == [(0, False), (0, True), (1, False), (1, True)]
    assert handle.report().last_step == 1
