"""What hookline takes for granted of torch's autograd beyond its public promises; fails when a version changes it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from hookline.sites import _torch


def node_of(tensor: torch.Tensor):
    return tensor.grad_fn


# -- sequence numbers -----------------------------------------------------------------------------------------


def test_the_sequence_number_is_that_of_the_next_node():
    """The number read before an operation is the number its node gets, and it grows by one with each."""
    x = torch.ones(1, requires_grad=True)
    before = _torch.sequence_number()
    y = x * 2
    assert _torch.sequence_number_of(node_of(y)) == before
    z = y + 1
    assert _torch.sequence_number_of(node_of(z)) == before + 1
    assert _torch.sequence_number() == before + 2


def test_parameters_have_their_gradients_before_an_older_node_runs():
    """When the producer of a module's input has its turn, the module's parameters are accumulated."""
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True) * 2
    seen = []
    x.register_hook(lambda grad: seen.append(layer.weight.grad is not None and layer.bias.grad is not None))
    layer(x).sum().backward()
    assert seen == [True]


class Double(torch.autograd.Function):
    """A function written in Python."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


# -- nodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x: x * 2, Double.apply, lambda x: x.view_as(x), lambda x: x.unbind()[0]])
def test_the_hooks_of_a_tensor_live_with_its_node_under_any_key(make):
    """The hook runs when the tensor itself is gone, is found again as long as it is not, and goes with the graph."""

    class Seen(list):
        def __call__(self, grad):
            self.append(grad)

    y = make(torch.ones(1, requires_grad=True))
    seen = _torch.only_hook(y, node_of(y), Seen)
    gc.collect()
    assert _torch.only_hook(y, node_of(y), Seen) is seen
    z = y * 3
    del y
    z.sum().backward()
    assert len(seen) == 1
    gone = weakref.ref(seen)
    del seen, z
    assert gone() is None


def test_boundary_finds_the_nodes_that_lead_to_an_input():
    """Only nodes of the call are walked, and each hit comes with its slot and number."""
    x = torch.ones(2, requires_grad=True) * 1
    other = torch.ones(2, requires_grad=True)
    since = _torch.sequence_number()
    a = x * other
    b = other + a.exp() * x
    found = _torch.boundary([node_of(b)], {node_of(x): {0: 7}}, since)
    assert {(type(node).__name__, *hits) for node, hits in found} == {
        ("MulBackward0", (0, 7)),
        ("MulBackward0", (1, 7)),
    }
    assert _torch.boundary([node_of(b)], {node_of(x): {0: 7}}, _torch.sequence_number()) == []
    assert _torch.boundary([node_of(b)], {node_of(x): {1: 7}}, since) == []


# -- the engine -----------------------------------------------------------------------------------------------


def test_a_queued_callback_is_dropped_by_a_backward_that_raises():
    """Nothing that was queued runs later, and the engine lets go of it."""

    class Callback:
        ran = 0

        def __call__(self) -> None:
            Callback.ran += 1

    callback = Callback()
    reference = weakref.ref(callback)

    def fail(grad: torch.Tensor) -> None:
        _torch.queue_end_of_backward(reference())
        raise ValueError("mine")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        (x * 2).backward()
    (torch.ones(1, requires_grad=True) * 2).backward()
    assert Callback.ran == 0
    del callback
    gc.collect()
    assert reference() is None


# -- graph nodes and what they save ---------------------------------------------------------------------------


def test_the_engine_tells_which_nodes_the_running_pass_comes_to():
    """Only those that this backward reaches; it refuses leaves inside of autograd.grad()."""
    x = torch.ones(2, requires_grad=True)
    used, unused = x.sin(), x.cos()
    told = []
    used.register_hook(lambda grad: told.extend(map(_torch.will_execute, (node_of(used), node_of(unused)))))
    used.sum().backward(retain_graph=True)
    assert told == [True, False]
    leaf = torch.autograd.graph.get_gradient_edge(x).node
    used.register_hook(lambda grad: told.append(_torch.will_execute(leaf)))
    used.sum().backward(retain_graph=True)
    assert told[-1] is True
    with pytest.raises(RuntimeError, match="leaf node"):
        torch.autograd.grad(used.sum(), x)


def test_torch_hands_a_saved_output_over_with_the_node_that_keeps_it():
    """Why we detach it: a pack function that gives it back makes a ring that nobody sees."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or 0, lambda value: value):
        y = torch.ones(3, requires_grad=True).exp()
    assert seen[0] is y
