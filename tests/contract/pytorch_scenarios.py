"""What a hook of torch does to modules and the process, as scenarios that take torch's registration or hookline's.

The table is in `test_pytorch_inventory`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

ONE = [1.0, 1.0]


class Scale(nn.Module):
    """Multiplies by five, and by a keyword."""

    def forward(self, x, *, by=1.0):
        if by == 0:
            raise ZeroDivisionError
        return x * 5 * by


class Weighted(nn.Module):
    """One parameter of two numbers, 1 and 1, and one input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight * 3


def leaf():
    return torch.ones(2, requires_grad=True)


def numbers(value):
    """Tensors as plain numbers, in whatever is around them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [numbers(item) for item in value]
    return value


# -- how the two register -----------------------------------------------------------------------------------
# A scenario gets `register(place, hook, **options)`, which gives a handle.


def method(name):
    """torch's: a method of the thing itself."""
    return lambda place, hook, **options: getattr(place, name)(hook, **options)


def process(function):
    """torch's: a function for the whole process; the place is not asked for."""
    return lambda place, hook, **options: function(hook, **options)


def on_module(kind):
    return lambda place, hook, **options: hl.attach(place, hook, on=kind, **options)


def everywhere(kind):
    return lambda place, hook, **options: hl.attach_everywhere(hook, on=kind, **options)


def on_tensor(kind):
    return lambda place, hook, **options: hl.attach_tensor(place, hook, on=kind, **options)


def on_node(kind):
    return lambda place, hook, **options: hl.attach_node(place, hook, on=kind, **options)


def on_optimizer(kind):
    return lambda place, hook, **options: hl.attach_optimizer(place, hook, on=kind, **options)


# -- scenarios: modules -------------------------------------------------------------------------------------


def forward_pre(register):
    """(m, args) → None/args."""
    module, seen = Scale(), []
    with register(module, lambda m, args: seen.append((m is module, numbers(args)))):
        plain = module(torch.ones(2))
    with register(module, lambda m, args: (args[0] + 1,)):
        edited = module(torch.ones(2))
    return seen, numbers(plain), numbers(edited), numbers(module(torch.ones(2)))


def forward_pre_with_kwargs(register):
    """(m, args, kwargs) → None/(args, kwargs)."""
    module, seen = Scale(), []
    with register(module, lambda m, args, kwargs: seen.append((numbers(args), kwargs)), with_kwargs=True):
        plain = module(torch.ones(2), by=2.0)
    with register(module, lambda m, args, kwargs: ((args[0] + 1,), {"by": 3.0}), with_kwargs=True):
        edited = module(torch.ones(2), by=2.0)
    return seen, numbers(plain), numbers(edited)


def forward(register):
    """(m, args, out) → None/new out."""
    module, seen = Scale(), []
    with register(module, lambda m, args, out: seen.append((m is module, numbers(args), numbers(out)))):
        plain = module(torch.ones(2))
    with register(module, lambda m, args, out: out + 1):
        edited = module(torch.ones(2))
    return seen, numbers(plain), numbers(edited), numbers(module(torch.ones(2)))


def forward_with_kwargs(register):
    """(m, args, kwargs, out) → None/new out."""
    module, seen = Scale(), []
    hook = lambda m, args, kwargs, out: seen.append((numbers(args), kwargs, numbers(out))) or out + 1  # noqa: E731
    with register(module, hook, with_kwargs=True):
        edited = module(torch.ones(2), by=2.0)
    return seen, numbers(edited)


def forward_always(register):
    """Runs with None when the forward raises."""
    module, seen = Scale(), []
    with register(module, lambda m, args, out: seen.append(numbers(out)), always_call=True):
        module(torch.ones(2))
        with pytest.raises(ZeroDivisionError):
            module(torch.ones(2), by=0)
    return seen


def prepended(run):
    """prepend=True goes before what is there; ``run`` makes the hooks fire once."""

    def scenario(register):
        place, fire = run()
        events = []
        for label, prepend in (("a", False), ("b", True), ("c", True), ("d", False)):
            register(place, lambda *_, label=label: events.append(label), prepend=prepend)
        fire()
        return events

    return scenario


def one_call():
    module = Weighted()
    return module, lambda: module(leaf()).sum().backward()


def backward_pre(register):
    """(m, grad_output) → None/tuple; reaches parameters and inputs."""
    module, x, seen = Weighted(), leaf(), []
    with register(module, lambda m, grads: seen.append((m is module, numbers(grads))) or (grads[0] * 10,)):
        module(x).sum().backward()
    return seen, numbers(x.grad), numbers(module.weight.grad)


def backward(register):
    """(m, grad_input, grad_output) → None/tuple replacing grad_input; parameters keep their gradients."""
    module, x, seen = Weighted(), leaf(), []
    hook = lambda m, gi, go: seen.append((m is module, numbers(gi), numbers(go))) or (gi[0] * 10,)  # noqa: E731
    with register(module, hook):
        module(x).sum().backward()
    return seen, numbers(x.grad), numbers(module.weight.grad)


def state_dict_pre(register):
    """(m, prefix, keep_vars); what it changes in the module is saved."""
    module, seen = Weighted(), []

    def hook(m, prefix, keep_vars):
        seen.append((m is module, prefix, keep_vars))
        with torch.no_grad():
            m.weight.fill_(7.0)

    with register(module, hook):
        state = module.state_dict(prefix="p.")
    return seen, {key: numbers(value) for key, value in state.items()}


def state_dict_post(register):
    """(m, sd, prefix, local_metadata); changes the dictionary in place."""
    module, seen = Weighted(), []

    def hook(m, state, prefix, metadata):
        seen.append((m is module, list(state), prefix, metadata["version"]))
        state["p.extra"] = 1

    with register(module, hook):
        state = module.state_dict(prefix="p.")
    return seen, list(state)


def load_state_dict_pre(register):
    """(m, sd, prefix, local_md, strict, missing, unexpected, errors); may rename keys."""
    module, seen = Weighted(), []

    def hook(m, state, prefix, metadata, strict, missing, unexpected, errors):
        seen.append((m is module, list(state), prefix, strict))
        state["weight"] = state.pop("old_weight")
        assert missing == unexpected == errors == []

    with register(module, hook):
        module.load_state_dict({"old_weight": torch.full((2,), 4.0)})
    return seen, numbers(module.weight)


def load_state_dict_post(register):
    """(m, incompatible_keys); clearing it suppresses the strict error."""
    module, seen = Weighted(), []

    def hook(m, keys):
        seen.append((m is module, list(keys.missing_keys), list(keys.unexpected_keys)))
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    with register(module, hook):
        module.load_state_dict({"other": torch.ones(2)})
    return seen


# -- scenarios: the process ---------------------------------------------------------------------------------


def everywhere_forward_pre(register):
    """All modules, children after their parents."""
    model, seen = nn.Sequential(Scale(), Scale()), []
    with register(None, lambda m, args: seen.append((type(m).__name__, numbers(args)))):
        model(torch.ones(2))
    model(torch.ones(2))
    with register(None, lambda m, args: (args[0] + 1,)):
        edited = Scale()(torch.ones(2))
    return seen, numbers(edited)


def everywhere_forward(register):
    """All modules, parents after their children."""
    model, seen = nn.Sequential(Scale(), Scale()), []
    with register(None, lambda m, args, out: seen.append((type(m).__name__, numbers(out)))):
        model(torch.ones(2))
    model(torch.ones(2))
    with register(None, lambda m, args, out: out + 1):
        edited = Scale()(torch.ones(2))
    return seen, numbers(edited)


def everywhere_forward_with_kwargs(register):
    """(m, args, kwargs, out)."""
    seen = []
    with register(None, lambda m, args, kwargs, out: seen.append((kwargs, numbers(out))), with_kwargs=True):
        Scale()(torch.ones(2), by=2.0)
    return seen


def everywhere_forward_always(register):
    """Runs with None when the forward raises."""
    module, seen = Scale(), []
    with (
        register(None, lambda m, args, out: seen.append(numbers(out)), always_call=True),
        pytest.raises(ZeroDivisionError),
    ):
        module(torch.ones(2), by=0)
    return seen


def everywhere_backward_pre(register):
    """All modules, the last one first; edits count."""
    model, x, seen = nn.Sequential(Weighted(), Scale()), leaf(), []
    with register(None, lambda m, grads: seen.append((type(m).__name__, numbers(grads)))):
        model(x).sum().backward()
    y = leaf()
    with register(None, lambda m, grads: (grads[0] * 10,)):
        Scale()(y).sum().backward()
    return sorted(seen), numbers(x.grad), numbers(y.grad)


def everywhere_backward(register):
    """All modules; edits count."""
    model, x, seen = nn.Sequential(Weighted(), Scale()), leaf(), []
    with register(None, lambda m, gi, go: seen.append((type(m).__name__, numbers(gi), numbers(go)))):
        model(x).sum().backward()
    y = leaf()
    with register(None, lambda m, gi, go: (gi[0] * 10,)):
        Scale()(y).sum().backward()
    return sorted(seen), numbers(x.grad), numbers(y.grad)


def registration(kind, make):
    """(m, name, value) → None/replacement."""

    def scenario(register):
        module, seen, value, other = nn.Module(), [], make(), make()
        store = getattr(module, f"register_{kind}")
        with register(None, lambda m, name, given: seen.append((m is module, name, given is value))):
            store("one", value)
        with register(None, lambda m, name, given: other):
            store("two", make())
        store("three", value)
        return seen, module.one is value, module.two is other, module.three is value

    return scenario
