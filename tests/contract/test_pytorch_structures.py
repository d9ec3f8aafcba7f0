"""PyTorch: gradients of inputs and outputs in containers of any sort."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from helpers_contract import EDITING, gradient_spy
from helpers_models import Fn, leaf
from transformers.utils import ModelOutput

import hookline as hl


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


# -- outputs and inputs of any structure ----------------------------------------------------------------------


@EDITING
@pytest.mark.parametrize("structure", STRUCTURES)
def test_backward_hooks_yield_the_gradient_of_each_tensor_of_a_structured_output(structure, editing):
    """Whatever holds the outputs, each of its tensors has its gradient reported, and its type is kept."""
    make, seen, pre, x = STRUCTURES[structure], [], [], leaf(2)
    module = Fn(lambda x: make(x * 2, x * 3))
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    hl.attach(module, lambda m, grad_output: pre.append(grad_output), on="backward_pre")
    output = module(x)
    assert type(output) is type(make(x, x))
    first, second = tensors_in(output)
    assert torch.equal(first, x * 2)
    assert torch.equal(second, x * 3)
    (first * 10 + second * 100).sum().backward()
    [(grad_input, grad_output)] = seen
    grads = [grad for grad in grad_output if grad is not None]
    assert [grad.tolist() for grad in grads] == [[10.0, 10.0], [100.0, 100.0]]
    assert [grad.tolist() for grad in grad_input] == [[320.0, 320.0]]
    assert [grad.tolist() for grad in x.grad] == [320.0, 320.0]
    assert [grad for grad in pre[0] if grad is not None] == grads


@EDITING
@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_output_that_the_loss_does_not_use_has_no_gradient_and_does_not_silence_the_other(structure, editing):
    """If only one of two outputs is used, the hook fires once, with None for the other."""
    make, seen, x = STRUCTURES[structure], [], leaf(2)
    module = Fn(lambda x: make(x * 2, x * 3))
    hl.attach(module, gradient_spy(seen, editing=editing), on="backward")
    _, second = tensors_in(module(x))
    second.sum().backward()
    [(grad_input, grad_output)] = seen
    assert grad_output[0] is None
    assert [grad.tolist() for grad in grad_output if grad is not None] == [[1.0, 1.0]]
    assert [grad.tolist() for grad in grad_input] == [[3.0, 3.0]]


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
