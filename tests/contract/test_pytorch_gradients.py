"""PyTorch: whose gradients a backward hook reports, in containers of any sort, and that it disturbs nothing."""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
from helpers_contract import EDITING, gradient_spy
from helpers_models import Fn, Scale, assert_same_grads, leaf, logger, mlp, twin
from torch import nn
from transformers.utils import ModelOutput

import hookline as hl

GRADIENT_KINDS = ["backward_pre", "backward"]


@EDITING
def test_an_unused_input_gets_no_gradient(editing):
    """A leaf, and one that a layer made: .grad stays None, of that layer's weights too, and so is their grad_input."""
    a, b, producer, seen = leaf(4, 2), leaf(4, 2, seed=2), nn.Linear(3, 2), []
    module = Fn(lambda a, b, c: a * 2)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    module(a, b, producer(leaf(4, 3))).sum().backward()
    assert (b.grad, producer.weight.grad) == (None, None)
    [(grad_input, _)] = seen
    assert torch.equal(grad_input[0], torch.full((4, 2), 2.0))
    assert grad_input[1:] == (None, None)


@EDITING
@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
def test_a_residual_input_reports_the_modules_own_share_and_an_edit_touches_that_alone(editing, produced):
    """For x + 5x the hook reports 5, its own share; the input gets 6, and 11, not 12, if the hook doubles its share."""
    module, seen, x = Scale(5.0), [], leaf(3)

    def hook(module, grad_input, grad_output):
        seen.append(grad_input[0])
        return (grad_input[0] * 2,) if editing else None

    hl.attach(module, hook, on="backward")
    hidden = x * 1 if produced else x
    (module(hidden) + hidden).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 5.0))
    assert torch.equal(x.grad, torch.full((3,), 11.0 if editing else 6.0))


INPLACE_SUCCESSORS = {
    "relu_": lambda out: nn.functional.relu(out, inplace=True),
    "add_": lambda out: out.add_(1),
    "setitem": lambda out: out.index_fill_(0, torch.tensor([0]), 0.0),
}


@EDITING
@pytest.mark.parametrize("successor", INPLACE_SUCCESSORS)
@pytest.mark.parametrize("kind", GRADIENT_KINDS)
def test_in_place_operations_on_a_hooked_output_stay_legal(kind, successor, editing):
    """Training with ReLU(inplace=True) or out.add_(1) behind a hooked Linear works, with the same gradients."""
    module, x, seen = nn.Linear(3, 2), leaf(4, 3), []
    reference, x_reference = copy.deepcopy(module), twin(x)

    def hook(module, *grads):
        seen.append(grads)
        return grads[0] if editing else None

    hl.attach(module, hook, on=kind)
    act = INPLACE_SUCCESSORS[successor]
    out, raw = module(x), reference(x_reference)
    raw.retain_grad()
    act(out).square().sum().backward()
    expected = raw * 1
    act(expected).square().sum().backward()
    assert torch.equal(x.grad, x_reference.grad)
    assert_same_grads(module, reference)
    assert len(seen) == 1
    assert torch.equal(seen[0][-1][0], raw.grad)


def test_an_edit_of_what_a_module_sends_to_an_input_that_it_changes_in_place_is_refused():
    """In the forward, with the module, the hook and the remedy: no gradient is edited halfway."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), leaf(6, 3)
    with (
        hl.attach(model, "1", lambda m, gi, go: (gi[0] * 4,), on="backward", name="four"),
        pytest.raises(hl.errors.UnhookableError, match=r"'four' on '1'.*in place.*observe=True"),
    ):
        model(x)
    module = Fn(lambda x: x.mul_(2))
    with (
        hl.attach(module, lambda m, gi, go: (gi[0] * 4,), on="backward"),
        pytest.raises(RuntimeError, match=r"HooklineGate.* modified inplace"),
    ):
        module(x * 1)


def test_an_edited_input_that_goes_out_again_cannot_be_changed_past_its_other_users():
    """The gradient of the other users would be wrong, so torch refuses it, as behind its own full backward hook."""
    module, x = Fn(lambda x: x), leaf(2)
    hl.attach(module, lambda m, gi, go: (gi[0] * 4,), on="backward")
    with pytest.raises(RuntimeError, match="HooklineGate"):
        module(x * 3).mul_(5)


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "accumulating"])
def test_a_first_layer_has_the_parameter_gradients_of_this_backward(accumulate):
    """Without a gradient to its input, the hook still finds .grad of its weights as this backward leaves it."""
    model, found = mlp(), []
    x = leaf(4, 3).detach()

    def hook(module, grad_input, grad_output):
        assert grad_input == (None,)
        found.append((module.weight.grad.clone(), module.bias.grad.clone(), grad_output[0]))

    hl.attach(model, "0", hook, on="backward")
    for scale in (1.0, 10.0):
        if not accumulate:
            model.zero_grad()
        (model(x) * scale).sum().backward()
        weight, bias, grad_output = found[-1]
        assert torch.equal(weight, model[0].weight.grad)
        assert torch.equal(bias, model[0].bias.grad)
        if not accumulate:
            assert torch.equal(weight, grad_output.T @ x)
    assert len(found) == 2
    assert not torch.equal(found[0][0], found[1][0])


@EDITING
def test_a_reused_module_fires_once_per_call_with_that_calls_gradients(editing):
    """Called twice in one forward, it reports each call with its index and its own gradients."""
    model, seen, x = nn.Sequential(Scale(2.0), Scale(3.0)), [], leaf(2)
    model.append(model[0])

    def hook(module, grad_input, grad_output, *, site):
        seen.append((site.call, grad_input[0].tolist(), grad_output[0].tolist()))
        return grad_input if editing else None

    hl.attach(model, "0", hook, on="backward")
    model(x).sum().backward()
    assert seen == [(1, [2.0, 2.0], [1.0, 1.0]), (0, [12.0, 12.0], [6.0, 6.0])]
    assert x.grad.tolist() == [12.0, 12.0]


def test_a_shared_module_is_hooked_once_per_hook_under_any_of_its_names():
    """A glob that meets a module under two names hooks it once; either name alone selects it."""
    model, events = nn.Sequential(Scale(), nn.Tanh()), []
    model.append(model[0])
    with hl.attach(model, "*", lambda m, args, out, *, site: events.append((site.name, site.call))):
        model(torch.ones(1))
    assert events == [("0", 0), ("1", 0), ("0", 1), ("", 0)]
    for name in ("0", "2"):
        with hl.attach(model, name, logger(events := [], name)) as handle:
            model(torch.ones(1))
        assert events == [name, name]
        assert handle.report().matched == 1


@EDITING
def test_two_backward_passes_over_one_graph_both_fire_with_their_own_gradients(editing):
    """With retain_graph=True each backward fires the hook once, with the gradients of that pass."""
    module, seen, x = nn.Linear(3, 2), [], leaf(4, 3)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    output = module(x * 1)
    (output * 2).sum().backward(retain_graph=True)
    (output * 3).sum().backward()
    ones = torch.ones(4, 2)
    assert [grad_output[0].tolist() for _, grad_output in seen] == [(ones * 2).tolist(), (ones * 3).tolist()]
    first, second = (ones * 2) @ module.weight, (ones * 3) @ module.weight
    assert torch.equal(x.grad, first + second)
    assert torch.equal(seen[0][0][0], first)
    assert torch.equal(seen[1][0][0], second)


@EDITING
def test_a_backward_that_raised_half_way_leaves_the_next_one_right(editing):
    """An error in another hook ends the pass; the next backward over the graph fires the hook as if new."""
    model, seen, x = mlp(), [], leaf(4, 3)
    hl.attach(model, "2", gradient_spy(seen, editing=editing), on="backward")
    bomb = hl.attach(model, "1", lambda m, go: 1 / 0, on="backward_pre")
    output = model(x)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    bomb.remove()
    seen.clear()
    (output * 2).sum().backward()
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_output[0], torch.full((4, 2), 2.0))
    assert torch.equal(grad_input[0], torch.full((4, 2), 2.0) @ model[2].weight)


def test_an_edit_under_create_graph_is_differentiated_too():
    """Doubling the gradient of x³ gives 6x², whose gradient is 12x."""
    module, x = Fn(lambda x: x**3), torch.tensor([1.0, 2.0], requires_grad=True)
    hl.attach(module, lambda m, gi, go: (gi[0] * 2,), on="backward")
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert torch.equal(grad, 6 * x**2)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, 12 * x)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    first: torch.Tensor
    second: torch.Tensor


class NamedPair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class PairOutput(ModelOutput):
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None


STRUCTURES = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"first": a, "second": b},
    "namedtuple": NamedPair,
    "dataclass": Pair,
    "frozen_dataclass": FrozenPair,
    "model_output": lambda a, b: PairOutput(first=a, second=b),
    "nested_tuple": lambda a, b: (a, (b, "text")),
    "nested_mix": lambda a, b: {"x": [a], "y": ({"z": b}, None)},
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


@EDITING
@pytest.mark.parametrize("used", [(10, 100), (None, 1)], ids=["both", "one"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_backward_hooks_yield_the_gradient_of_each_tensor_of_a_structured_output(structure, used, editing):
    """Whatever holds the outputs, each of its tensors has its gradient reported, and its type is kept.

    One that the loss does not use has None, and does not silence the other.
    """
    make, seen, pre, x = STRUCTURES[structure], [], [], leaf(2)
    module = Fn(lambda x: make(x * 2, x * 3))
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    hl.attach(module, lambda m, grad_output: pre.append(grad_output), on="backward_pre")
    output = module(x)
    assert type(output) is type(make(x, x))
    outputs = tensors_in(output)
    assert [torch.equal(each, x * factor) for each, factor in zip(outputs, (2, 3), strict=True)] == [True, True]
    sum(each * factor for each, factor in zip(outputs, used, strict=True) if factor).sum().backward()
    [(grad_input, grad_output)] = seen
    assert (grad_output[0] is None) == (used[0] is None)
    grads = [grad for grad in grad_output if grad is not None]
    assert [grad.tolist() for grad in grads] == [[float(factor)] * 2 for factor in used if factor]
    share = 2.0 * (used[0] or 0) + 3 * used[1]
    assert [grad.tolist() for grad in grad_input] == [[share] * 2]
    assert x.grad.tolist() == [share] * 2
    assert [grad for grad in pre[0] if grad is not None] == grads


def test_a_hook_is_told_which_tensor_each_gradient_belongs_to():
    """site.inputs and site.outputs name the gradients: positions, keys and paths."""
    names = []

    def hook(module, grad_input, grad_output, *, site):
        names.append((site.inputs, site.outputs))
        assert len(site.inputs) == len(grad_input)
        assert len(site.outputs) == len(grad_output)

    module = Fn(lambda x, *, mask: {"logits": x * mask, "extra": (x,)})
    hl.attach(module, hook, on="backward")
    module(leaf(2), mask=leaf(2, seed=2))["logits"].sum().backward()
    assert names == [(("0", "mask"), ("logits", "extra.0"))]


@EDITING
@pytest.mark.parametrize("produced", [False, True], ids=["leaf", "non_leaf"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_inside_containers_report_their_gradients(structure, editing, produced):
    """A container as argument: its tensors' gradients are reported, and the forward is given its type."""
    a, b, seen, types = leaf(2), leaf(2, seed=2), [], []

    def forward(box):
        types.append(type(box))
        first, second = tensors_in(box)
        return first * 2 + second * 3

    module = Fn(forward)
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    box = STRUCTURES[structure](a * 1, b * 1) if produced else STRUCTURES[structure](a, b)
    module(box).sum().backward()
    assert types == [type(box)]
    assert [grad.tolist() for grad in seen[0][0] if grad is not None] == [[2.0, 2.0], [3.0, 3.0]]
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0])
