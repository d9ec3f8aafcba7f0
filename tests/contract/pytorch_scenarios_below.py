"""What a hook of torch does to tensors, graphs, optimizers and operators, as scenarios like `pytorch_scenarios`."""

from __future__ import annotations

import copy
import io

import torch
from pytorch_scenarios import leaf, numbers
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import SGD
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl

# -- scenarios: tensors and graphs --------------------------------------------------------------------------


def tensor_hook(register):
    """(grad) → None/grad, on a computed tensor and on a leaf."""
    x, seen = leaf(), []
    hidden = x * 2
    register(hidden, lambda grad: seen.append(numbers(grad)))
    register(hidden, lambda grad: grad * 10)
    handle = register(x, lambda grad: grad + 1)
    (hidden * 3).sum().backward(retain_graph=True)
    first = numbers(x.grad)
    handle.remove()
    (hidden * 3).sum().backward()
    return seen, first, numbers(x.grad)


def post_accumulate(register):
    """(param) → None, when `.grad` is complete."""
    x, seen = nn.Parameter(torch.ones(2)), []
    with register(x, lambda parameter: seen.append((parameter is x, numbers(parameter.grad)))):
        (x * 2 + x * 3).sum().backward()
        (x * 2 + x * 3).sum().backward()
    (x * 2).sum().backward()
    return seen


def node_pre(register):
    """(grad_outputs) → None/tuple."""
    a, b, seen = leaf(), torch.full((2,), 4.0, requires_grad=True), []
    product = a * b
    register(product.grad_fn, lambda grads: seen.append(numbers(grads)) or (grads[0] * 10,))
    product.sum().backward()
    return seen, numbers(a.grad), numbers(b.grad)


def node_post(register):
    """(grad_inputs, grad_outputs) → None/tuple."""
    a, b, seen = leaf(), torch.full((2,), 4.0, requires_grad=True), []
    product = a * b
    hook = lambda gi, go: seen.append((numbers(gi), numbers(go))) or (gi[0] * 10, None)  # noqa: E731
    register(product.grad_fn, hook)
    product.sum().backward()
    return seen, numbers(a.grad), b.grad


def multi_all(register):
    """Once, with every gradient; None for what is not reached."""
    a, b, c, seen = leaf(), leaf(), leaf(), []
    with register((a, b, c), lambda grads: seen.append(numbers(grads)), mode="all"):
        (a * 2 + c * 3).sum().backward()
    (a * 2).sum().backward()
    return seen


def multi_any(register):
    """Once, with the first gradient."""
    a, seen = leaf(), []
    hidden = a * 2
    with register((a, hidden), lambda grad: seen.append(numbers(grad)), mode="any"):
        (hidden * 3).sum().backward()
    return seen


def saved(register):
    """pack per saved tensor, unpack per use; what unpack gives is used."""
    x, seen = torch.full((2,), 3.0, requires_grad=True), []
    with register(lambda tensor: seen.append(numbers(tensor)) or (tensor, 2), lambda packed: packed[0] * packed[1]):
        y = x * x.detach()
    z = x * 5
    (y + z).sum().backward()
    return seen, numbers(x.grad)


def edge(register):
    """The node that a leaf's gradient goes to, as an edge."""
    x, seen = leaf(), []
    kept = get_gradient_edge(x)
    register(kept, lambda grads: seen.append(numbers(grads)))
    (x * 2).sum().backward()
    return seen


# -- scenarios: optimizers ----------------------------------------------------------------------------------


def sgd():
    weight = leaf()
    weight.grad = torch.ones(2)
    return weight, SGD([weight], lr=1.0)


def one_exercise():
    _, optimizer = sgd()

    def fire():
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    return optimizer, fire


def step_pre(register):
    """(opt, args, kwargs) → None/(args, kwargs)."""
    weight, optimizer = sgd()
    seen, closure = [], lambda: 5.0
    with register(optimizer, lambda o, args, kwargs: seen.append((o is optimizer, len(args), kwargs, numbers(weight)))):
        optimizer.step()
    with register(optimizer, lambda o, args, kwargs: ((o, closure), {})):
        result = optimizer.step()
    return seen, result, numbers(weight)


def step_post(register):
    """(opt, args, kwargs) → None, after the weights have changed."""
    weight, optimizer = sgd()
    seen = []
    with register(optimizer, lambda o, args, kwargs: seen.append((o is optimizer, len(args), kwargs, numbers(weight)))):
        optimizer.step()
    optimizer.step()
    return seen


def optimizer_state_dict_pre(register):
    """(opt); what it changes is saved."""
    _, optimizer = sgd()
    with register(optimizer, lambda o: o.param_groups[0].update(lr=0.5)):
        return optimizer.state_dict()["param_groups"][0]["lr"]


def optimizer_state_dict_post(register):
    """(opt, sd) → None/another."""
    _, optimizer = sgd()
    with register(optimizer, lambda o, state: {**state, "extra": o is optimizer}):
        state = optimizer.state_dict()
    return state["extra"], sorted(optimizer.state_dict())


def optimizer_load_state_dict_pre(register):
    """(opt, sd) → None/another."""
    _, optimizer = sgd()
    state = copy.deepcopy(optimizer.state_dict())
    slower = copy.deepcopy(state)
    slower["param_groups"][0]["lr"] = 0.25
    with register(optimizer, lambda o, given: slower):
        optimizer.load_state_dict(state)
    return optimizer.param_groups[0]["lr"], state["param_groups"][0]["lr"]


def optimizer_load_state_dict_post(register):
    """(opt), when all is loaded."""
    _, optimizer = sgd()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.125
    seen = []
    with register(optimizer, lambda o: seen.append((o is optimizer, o.param_groups[0]["lr"]))):
        optimizer.load_state_dict(state)
    return seen


# -- scenarios: operators -----------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    """torch's way to see functions: a mode."""

    def __init__(self, target, hook):
        super().__init__()
        self.target, self.hook = target, hook

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return self.hook(args, output) if func is self.target else output


class DispatchMode(TorchDispatchMode):
    """torch's way to see operators: another mode."""

    def __init__(self, target, hook):
        super().__init__()
        self.target, self.hook = target, hook

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return self.hook(args, output) if func is self.target else output


def function_site(target, hook):
    return hl.attach_function(target, lambda fn, inputs, outputs: hook(inputs, outputs[0]))


def operator(target, call):
    """Each call with its inputs and output, which may be replaced."""

    def scenario(register):
        seen = []

        def hook(inputs, output):
            seen.append((numbers(inputs), numbers(output)))
            return output * 10

        with register(target, hook):
            edited = call()
        return seen, numbers(edited), numbers(call())

    return scenario


def copied(register):
    """A deep copy and a file of a leaf with such a hook: no warning, no hook."""
    x, seen = leaf(), []
    register(x, lambda grad: seen.append(numbers(grad)))
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    for other in (copy.deepcopy(x), torch.load(stream, weights_only=False)):
        (other * 2).sum().backward()
    return seen
