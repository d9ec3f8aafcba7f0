"""InfiniTrain's page on hooks, example by example, in Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

OBSERVED = ("forward_pre", "forward", "backward_pre", "backward")


def batch(*shape, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, requires_grad=requires_grad)


# -- module hooks ------------------------------------------------------------


def test_forward_pre_hook():
    """Called before the forward, with the module and its inputs."""
    module, seen, x = nn.Linear(3, 2), [], batch(4, 3)

    def hook(mod, inputs):
        seen.append((mod, inputs))

    handle = hl.attach(module, hook, on="forward_pre")
    module(x)
    [(mod, inputs)] = seen
    assert mod is module
    assert inputs == (x,)
    assert isinstance(handle, hl.HookHandle)


def test_forward_post_hook():
    """Called after the forward, with the module, its inputs and its outputs."""
    module, seen, x = nn.Linear(3, 2), [], batch(4, 3)

    def hook(mod, inputs, outputs):
        seen.append((mod, inputs, outputs))

    hl.attach(module, hook, on="forward_post")
    output = module(x)
    [(mod, inputs, outputs)] = seen
    assert mod is module
    assert inputs == (x,)
    assert outputs is output


def test_backward_pre_hook():
    """Called before the module's backward, with the gradients of its outputs."""
    module, seen, x = nn.Linear(3, 2), [], batch(4, 3, requires_grad=True)

    def hook(mod, grad_outputs):
        seen.append((mod, grad_outputs, mod.weight.grad))

    hl.attach(module, hook, on="backward_pre")
    module(x).sum().backward()
    [(mod, grad_outputs, weight_grad)] = seen
    assert mod is module
    assert len(grad_outputs) == 1
    assert torch.equal(grad_outputs[0], torch.ones(4, 2))
    assert weight_grad is None


def test_backward_post_hook():
    """Called after the module's backward, with the gradients of its inputs and of its outputs."""
    module, seen, x = nn.Linear(3, 2), [], batch(4, 3, requires_grad=True)

    def hook(mod, grad_inputs, grad_outputs):
        seen.append((mod, grad_inputs, grad_outputs, mod.weight.grad is not None))

    hl.attach(module, hook, on="backward_post")
    module(x).sum().backward()
    [(mod, grad_inputs, grad_outputs, has_weight_grad)] = seen
    assert mod is module
    assert [grad.shape for grad in grad_inputs] == [(4, 3)]
    assert torch.equal(grad_inputs[0], torch.ones(4, 2) @ module.weight)
    assert torch.equal(grad_outputs[0], torch.ones(4, 2))
    assert has_weight_grad


def test_basic_module_hooks():
    """The source's own test: all four kinds on an identity module, one output, each fired once."""
    module, events = nn.Identity(), []
    for kind in OBSERVED:
        hl.attach(module, lambda *_, kind=kind: events.append(kind), on=kind)
    output = module(batch(2, 3, requires_grad=True))
    assert output.shape == (2, 3)
    output.sum().backward()
    assert events == list(OBSERVED)


def test_hook_remove():
    """Every registration returns a handle; Remove leaves the other hooks alone, also when called twice."""
    module, events = nn.Identity(), []
    first = hl.attach(module, lambda mod, inputs: events.append("first"), on="forward_pre")
    hl.attach(module, lambda mod, inputs: events.append("second"), on="forward_pre")
    module(batch(2))
    first.remove()
    first.remove()
    module(batch(2))
    assert events == ["first", "second", "second"]


def test_module_call_flow():
    """The module's part of the picture: pre-hooks, Forward, post-hooks; backward from the last layer up."""
    events = []

    class Layer(nn.Linear):
        def forward(self, x):
            events.append(f"{self.label} Forward")
            return super().forward(x)

    model = nn.Sequential(Layer(3, 3), Layer(3, 3))
    for label, layer in zip("ab", model, strict=True):
        layer.label = label
        for kind in ("forward_pre", "forward_post", "backward_pre", "backward_post"):
            hl.attach(layer, lambda mod, *_, kind=kind: events.append(f"{mod.label} {kind}"), on=kind)
    model(batch(2, 3, requires_grad=True)).sum().backward()
    assert events == [
        "a forward_pre",
        "a Forward",
        "a forward_post",
        "b forward_pre",
        "b Forward",
        "b forward_post",
        "b backward_pre",
        "b backward_post",
        "a backward_pre",
        "a backward_post",
    ]


def test_calling_the_module_and_not_its_forward():
    """(*module)(inputs) triggers the hooks, module->Forward(inputs) does not."""
    module, events = nn.Linear(3, 2), []
    hl.attach(module, lambda mod, inputs: events.append("fired"), on="forward_pre")
    module.forward(batch(4, 3))
    assert events == []
    module(batch(4, 3))
    assert events == ["fired"]


class Square(torch.autograd.Function):
    """What InfiniTrain calls a Function: forward and backward of one operation."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


FUNCTIONS = {
    "autograd.Function": (Square, lambda x: Square.apply(x)),
    "torch": (torch.square, torch.square),
    "name": ("torch.square", torch.square),
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    """x², as a Function of one's own, a function of torch, and by name: target and call."""
    return FUNCTIONS[request.param]


# -- function hooks --------------------------------------------------------------------


def test_function_forward_pre_hook(function):
    """Called before the forward, with the function and its inputs."""
    target, run = function
    seen, x = [], batch(4, 3)

    def hook(func, inputs):
        seen.append((func, inputs))

    handle = hl.attach_function(target, hook, on="forward_pre")
    run(x)
    handle.remove()
    [(func, inputs)] = seen
    assert isinstance(func, hl.sites.FunctionSite)
    assert len(inputs) == 1
    assert inputs[0] is x
    assert isinstance(handle, hl.HookHandle)


def test_function_forward_post_hook(function):
    """Called after the forward, with the function, its inputs and its outputs."""
    target, run = function
    seen, x = [], batch(4, 3)

    def hook(func, inputs, outputs):
        seen.append((inputs, outputs))

    handle = hl.attach_function(target, hook, on="forward_post")
    output = run(x)
    handle.remove()
    [(inputs, outputs)] = seen
    assert inputs[0] is x
    assert len(outputs) == 1
    assert torch.equal(outputs[0], output)


def test_function_backward_pre_hook(function):
    """Called when the gradients of the outputs have been accumulated, with them."""
    target, run = function
    seen, x = [], batch(4, 3, requires_grad=True)

    def hook(func, grad_outputs):
        seen.append(grad_outputs)

    handle = hl.attach_function(target, hook, on="backward_pre")
    output = run(x)
    (output + 2 * output).sum().backward()
    handle.remove()
    [(grad_output,)] = seen
    assert torch.equal(grad_output, torch.full((4, 3), 3.0))


def test_function_backward_post_hook(function):
    """Called after the backward, with the gradients of inputs and outputs."""
    target, run = function
    seen, x = [], batch(4, 3, requires_grad=True)

    def hook(func, grad_inputs, grad_outputs):
        seen.append((grad_inputs, grad_outputs))

    handle = hl.attach_function(target, hook, on="backward_post")
    run(x).sum().backward()
    handle.remove()
    [((grad_input,), (grad_output,))] = seen
    torch.testing.assert_close(grad_input, 2 * x.detach())
    assert torch.equal(grad_output, torch.ones(4, 3))


def test_function_hook_types():
    """One type for what goes before, one for what comes after, of functions and of modules."""
    for name in ("FunctionPreHook", "FunctionPostHook", "ModulePreHook", "ModulePostHook"):
        assert hasattr(hl.hook_types, name)


def test_function_call_flow(function):
    """Module pre, function pre, forward, function post, module post; backward the same way round."""
    target, run = function
    events = []

    class Layer(nn.Module):
        def forward(self, x):
            events.append("Forward()")
            return run(x)

    module = Layer()
    kinds = ("forward_pre", "forward_post", "backward_pre", "backward_post")
    handles = [hl.attach(module, lambda *_, kind=kind: events.append(f"module {kind}"), on=kind) for kind in kinds]
    handles += [
        hl.attach_function(target, lambda *_, kind=kind: events.append(f"function {kind}"), on=kind) for kind in kinds
    ]
    with hl.HandleSet(handles):
        output = module(batch(4, 3, requires_grad=True))
        output.sum().backward()
    assert events == [
        "module forward_pre",
        "Forward()",
        "function forward_pre",
        "function forward_post",
        "module forward_post",
        "module backward_pre",
        "function backward_pre",
        "function backward_post",
        "module backward_post",
    ]


def test_function_hook_order_and_removal(function):
    """Hooks run in registration order, and a removed one leaves the others alone."""
    target, run = function
    events, x = [], batch(4, 3)
    handles = [
        hl.attach_function(target, lambda func, inputs, label=label: events.append(label), on="forward_pre")
        for label in "abc"
    ]
    run(x)
    assert events == ["a", "b", "c"]
    handles[1].remove()
    run(x)
    assert events == ["a", "b", "c", "a", "c"]
    for handle in handles:
        handle.remove()
    run(x)
    assert events == ["a", "b", "c", "a", "c"]
