"""Every hook that torch has, as a scenario that takes torch's registration or hookline's, and the effect of both.

`row` above a scenario has torch's name, how hookline registers the same, and the effect. `test_pytorch_inventory` runs
them, and asks torch whether it has more.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_module
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import unserializable_hook

import hookline as hl

ONE = [1.0, 1.0]
TWO, THREE, FOUR, FIVE, TEN = ([value] * 2 for value in (2.0, 3.0, 4.0, 5.0, 10.0))
SIX, FIFTEEN, TWENTY_FIVE, THIRTY, FORTY, FIFTY = ([value] * 2 for value in (6.0, 15.0, 25.0, 30.0, 40.0, 50.0))
FIRST = ["c", "b", "a", "d"]
BACKWARD = ([(True, [THREE], [ONE])], THIRTY, THREE)
STORED = ([(True, "one", True)], True, True, True)
STATE = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


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


class Row(NamedTuple):
    """One hook of torch, and what stands for it here."""

    api: str
    ours: Callable[..., Any]
    scenario: Callable[[Callable[..., Any]], Any]
    effect: Any
    torchs: Callable[..., Any] | None = None
    """How torch registers it, where the name does not say it all."""

    @property
    def name(self):
        return re.split(r"[(,]", self.api)[0]

    @property
    def register_by_torch(self):
        if self.torchs is not None:
            return self.torchs
        owner, _, name = self.name.rpartition(".")
        if owner:
            return method(name)
        return process(getattr(torch_module, name, None) or getattr(torch_optimizer, name))


ROWS: list[Row] = []


def row(api, ours, effect, torchs=None):
    """Add the scenario below to `ROWS`: torch's name, how hookline registers, the effect, how torch does."""

    def add(scenario):
        ROWS.append(Row(api, ours, scenario, effect, torchs))
        return scenario

    return add


# -- scenarios: modules -------------------------------------------------------------------------------------


@row("Module.register_forward_pre_hook", on_module("forward_pre"), ([(True, [ONE])], FIVE, TEN, FIVE))
def forward_pre(register):
    """(m, args) → None/args."""
    module, seen = Scale(), []
    with register(module, lambda m, args: seen.append((m is module, numbers(args)))):
        plain = module(torch.ones(2))
    with register(module, lambda m, args: (args[0] + 1,)):
        edited = module(torch.ones(2))
    return seen, numbers(plain), numbers(edited), numbers(module(torch.ones(2)))


@row("Module.register_forward_pre_hook(with_kwargs=)", on_module("forward_pre"), ([([ONE], {"by": 2.0})], TEN, THIRTY))
def forward_pre_with_kwargs(register):
    """(m, args, kwargs) → None/(args, kwargs)."""
    module, seen = Scale(), []
    with register(module, lambda m, args, kwargs: seen.append((numbers(args), kwargs)), with_kwargs=True):
        plain = module(torch.ones(2), by=2.0)
    with register(module, lambda m, args, kwargs: ((args[0] + 1,), {"by": 3.0}), with_kwargs=True):
        edited = module(torch.ones(2), by=2.0)
    return seen, numbers(plain), numbers(edited)


@row("Module.register_forward_hook", on_module("forward"), ([(True, [ONE], FIVE)], FIVE, SIX, FIVE))
def forward(register):
    """(m, args, out) → None/new out."""
    module, seen = Scale(), []
    with register(module, lambda m, args, out: seen.append((m is module, numbers(args), numbers(out)))):
        plain = module(torch.ones(2))
    with register(module, lambda m, args, out: out + 1):
        edited = module(torch.ones(2))
    return seen, numbers(plain), numbers(edited), numbers(module(torch.ones(2)))


@row("Module.register_forward_hook(with_kwargs=)", on_module("forward"), ([([ONE], {"by": 2.0}, TEN)], [11.0] * 2))
def forward_with_kwargs(register):
    """(m, args, kwargs, out) → None/new out."""
    module, seen = Scale(), []
    hook = lambda m, args, kwargs, out: seen.append((numbers(args), kwargs, numbers(out))) or out + 1  # noqa: E731
    with register(module, hook, with_kwargs=True):
        edited = module(torch.ones(2), by=2.0)
    return seen, numbers(edited)


@row("Module.register_forward_hook(always_call=)", on_module("forward"), [FIVE, None])
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


for method_name, kind in (
    ("forward_pre", "forward_pre"),
    ("forward", "forward"),
    ("full_backward_pre", "backward_pre"),
    ("full_backward", "backward"),
):
    row(f"Module.register_{method_name}_hook(prepend=)", on_module(kind), FIRST)(prepended(one_call))


@row("Module.register_full_backward_pre_hook", on_module("backward_pre"), ([(True, [ONE])], THIRTY, THIRTY))
def backward_pre(register):
    """(m, grad_output) → None/tuple; reaches parameters and inputs."""
    module, x, seen = Weighted(), leaf(), []
    with register(module, lambda m, grads: seen.append((m is module, numbers(grads))) or (grads[0] * 10,)):
        module(x).sum().backward()
    return seen, numbers(x.grad), numbers(module.weight.grad)


@row("Module.register_full_backward_hook", on_module("backward"), BACKWARD)
@row("Module.register_full_backward_hook, torch's own way", on_module("full_backward"), BACKWARD)
def backward(register):
    """(m, grad_input, grad_output) → None/tuple replacing grad_input; parameters keep their gradients."""
    module, x, seen = Weighted(), leaf(), []
    hook = lambda m, gi, go: seen.append((m is module, numbers(gi), numbers(go))) or (gi[0] * 10,)  # noqa: E731
    with register(module, hook):
        module(x).sum().backward()
    return seen, numbers(x.grad), numbers(module.weight.grad)


@row(
    "Module.register_state_dict_pre_hook", on_module("state_dict_pre"), ([(True, "p.", False)], {"p.weight": [7.0] * 2})
)
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


@row(
    "Module.register_state_dict_post_hook",
    on_module("state_dict_post"),
    ([(True, ["p.weight"], "p.", 1)], ["p.weight", "p.extra"]),
)
@row(
    "Module._register_state_dict_hook",
    on_module("state_dict_post"),
    ([(True, ["p.weight"], "p.", 1)], ["p.weight", "p.extra"]),
)
def state_dict_post(register):
    """(m, sd, prefix, local_metadata); changes the dictionary in place."""
    module, seen = Weighted(), []

    def hook(m, state, prefix, metadata):
        seen.append((m is module, list(state), prefix, metadata["version"]))
        state["p.extra"] = 1

    with register(module, hook):
        state = module.state_dict(prefix="p.")
    return seen, list(state)


@row(
    "Module.register_load_state_dict_pre_hook",
    on_module("load_state_dict_pre"),
    ([(True, ["old_weight"], "", True)], FOUR),
)
@row(
    "Module._register_load_state_dict_pre_hook",
    on_module("load_state_dict_pre"),
    ([(True, ["old_weight"], "", True)], FOUR),
    lambda place, hook: place._register_load_state_dict_pre_hook(hook, with_module=True),
)
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


@row("Module.register_load_state_dict_post_hook", on_module("load_state_dict_post"), [(True, ["weight"], ["other"])])
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


@row(
    "register_module_forward_pre_hook",
    everywhere("forward_pre"),
    ([("Sequential", [ONE]), ("Scale", [ONE]), ("Scale", [FIVE])], TEN),
)
def everywhere_forward_pre(register):
    """All modules, children after their parents."""
    model, seen = nn.Sequential(Scale(), Scale()), []
    with register(None, lambda m, args: seen.append((type(m).__name__, numbers(args)))):
        model(torch.ones(2))
    model(torch.ones(2))
    with register(None, lambda m, args: (args[0] + 1,)):
        edited = Scale()(torch.ones(2))
    return seen, numbers(edited)


@row(
    "register_module_forward_hook",
    everywhere("forward"),
    ([("Scale", FIVE), ("Scale", TWENTY_FIVE), ("Sequential", TWENTY_FIVE)], SIX),
)
def everywhere_forward(register):
    """All modules, parents after their children."""
    model, seen = nn.Sequential(Scale(), Scale()), []
    with register(None, lambda m, args, out: seen.append((type(m).__name__, numbers(out)))):
        model(torch.ones(2))
    model(torch.ones(2))
    with register(None, lambda m, args, out: out + 1):
        edited = Scale()(torch.ones(2))
    return seen, numbers(edited)


@row("register_module_forward_hook(with_kwargs=)", everywhere("forward"), [({"by": 2.0}, TEN)])
def everywhere_forward_with_kwargs(register):
    """(m, args, kwargs, out)."""
    seen = []
    with register(None, lambda m, args, kwargs, out: seen.append((kwargs, numbers(out))), with_kwargs=True):
        Scale()(torch.ones(2), by=2.0)
    return seen


@row("register_module_forward_hook(always_call=)", everywhere("forward"), [None])
def everywhere_forward_always(register):
    """Runs with None when the forward raises."""
    module, seen = Scale(), []
    with (
        register(None, lambda m, args, out: seen.append(numbers(out)), always_call=True),
        pytest.raises(ZeroDivisionError),
    ):
        module(torch.ones(2), by=0)
    return seen


@row(
    "register_module_full_backward_pre_hook",
    everywhere("backward_pre"),
    ([("Scale", [ONE]), ("Sequential", [ONE]), ("Weighted", [FIVE])], FIFTEEN, FIFTY),
)
def everywhere_backward_pre(register):
    """All modules, the last one first; edits count."""
    model, x, seen = nn.Sequential(Weighted(), Scale()), leaf(), []
    with register(None, lambda m, grads: seen.append((type(m).__name__, numbers(grads)))):
        model(x).sum().backward()
    y = leaf()
    with register(None, lambda m, grads: (grads[0] * 10,)):
        Scale()(y).sum().backward()
    return sorted(seen), numbers(x.grad), numbers(y.grad)


@row(
    "register_module_full_backward_hook",
    everywhere("backward"),
    ([("Scale", [FIVE], [ONE]), ("Sequential", [FIFTEEN], [ONE]), ("Weighted", [FIFTEEN], [FIVE])], FIFTEEN, FIFTY),
)
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


for what, make in {
    "module": nn.ReLU,
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: torch.ones(2),
}.items():
    row(f"register_module_{what}_registration_hook", everywhere(f"register_{what}"), STORED)(registration(what, make))


# -- scenarios: tensors and graphs --------------------------------------------------------------------------


@row("Tensor.register_hook", on_tensor("grad"), ([THREE, THREE], [61.0] * 2, [121.0] * 2))
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


@row("Tensor.register_post_accumulate_grad_hook", on_tensor("param_grad"), [(True, FIVE), (True, TEN)])
@row(
    "Tensor.register_post_accumulate_grad_hook, by the name of a parameter",
    lambda place, hook: hl.attach(nn.ParameterDict({"x": place}), "x", hook, on="param_grad"),
    [(True, FIVE), (True, TEN)],
)
def post_accumulate(register):
    """(param) → None, when `.grad` is complete."""
    x, seen = nn.Parameter(torch.ones(2)), []
    with register(x, lambda parameter: seen.append((parameter is x, numbers(parameter.grad)))):
        (x * 2 + x * 3).sum().backward()
        (x * 2 + x * 3).sum().backward()
    (x * 2).sum().backward()
    return seen


@row("Node.register_prehook", on_node("pre"), ([[ONE]], FORTY, TEN))
def node_pre(register):
    """(grad_outputs) → None/tuple."""
    a, b, seen = leaf(), torch.full((2,), 4.0, requires_grad=True), []
    product = a * b
    register(product.grad_fn, lambda grads: seen.append(numbers(grads)) or (grads[0] * 10,))
    product.sum().backward()
    return seen, numbers(a.grad), numbers(b.grad)


@row("Node.register_hook", on_node("post"), ([([FOUR, ONE], [ONE])], FORTY, None))
def node_post(register):
    """(grad_inputs, grad_outputs) → None/tuple."""
    a, b, seen = leaf(), torch.full((2,), 4.0, requires_grad=True), []
    product = a * b
    hook = lambda gi, go: seen.append((numbers(gi), numbers(go))) or (gi[0] * 10, None)  # noqa: E731
    register(product.grad_fn, hook)
    product.sum().backward()
    return seen, numbers(a.grad), b.grad


@row("register_multi_grad_hook(mode='all')", on_tensor("grad"), [[TWO, None, THREE]], graph.register_multi_grad_hook)
def multi_all(register):
    """Once, with every gradient; None for what is not reached."""
    a, b, c, seen = leaf(), leaf(), leaf(), []
    with register((a, b, c), lambda grads: seen.append(numbers(grads)), mode="all"):
        (a * 2 + c * 3).sum().backward()
    (a * 2).sum().backward()
    return seen


@row("register_multi_grad_hook(mode='any')", on_tensor("grad"), [THREE], graph.register_multi_grad_hook)
def multi_any(register):
    """Once, with the first gradient."""
    a, seen = leaf(), []
    hidden = a * 2
    with register((a, hidden), lambda grad: seen.append(numbers(grad)), mode="any"):
        (hidden * 3).sum().backward()
    return seen


@row("saved_tensors_hooks", hl.saved_tensors, ([THREE], [11.0] * 2), graph.saved_tensors_hooks)
def saved(register):
    """pack per saved tensor, unpack per use; what unpack gives is used."""
    x, seen = torch.full((2,), 3.0, requires_grad=True), []
    with register(lambda tensor: seen.append(numbers(tensor)) or (tensor, 2), lambda packed: packed[0] * packed[1]):
        y = x * x.detach()
    z = x * 5
    (y + z).sum().backward()
    return seen, numbers(x.grad)


@row("get_gradient_edge", on_node("pre"), [[TWO]], lambda place, hook: place.node.register_prehook(hook))
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


for state_kind in STATE:
    row(f"Optimizer.register_{state_kind}_hook(prepend=)", on_optimizer(state_kind), FIRST)(prepended(one_exercise))


@row("Optimizer.register_step_pre_hook", on_optimizer("step_pre"), ([(True, 1, {}, ONE)], 5.0, [-1.0, -1.0]))
@row("register_optimizer_step_pre_hook", everywhere("step_pre"), ([(True, 1, {}, ONE)], 5.0, [-1.0, -1.0]))
def step_pre(register):
    """(opt, args, kwargs) → None/(args, kwargs)."""
    weight, optimizer = sgd()
    seen, closure = [], lambda: 5.0
    with register(optimizer, lambda o, args, kwargs: seen.append((o is optimizer, len(args), kwargs, numbers(weight)))):
        optimizer.step()
    with register(optimizer, lambda o, args, kwargs: ((o, closure), {})):
        result = optimizer.step()
    return seen, result, numbers(weight)


@row("Optimizer.register_step_post_hook", on_optimizer("step_post"), [(True, 1, {}, [0.0, 0.0])])
@row("register_optimizer_step_post_hook", everywhere("step_post"), [(True, 1, {}, [0.0, 0.0])])
def step_post(register):
    """(opt, args, kwargs) → None, after the weights have changed."""
    weight, optimizer = sgd()
    seen = []
    with register(optimizer, lambda o, args, kwargs: seen.append((o is optimizer, len(args), kwargs, numbers(weight)))):
        optimizer.step()
    optimizer.step()
    return seen


@row("Optimizer.register_state_dict_pre_hook", on_optimizer("state_dict_pre"), 0.5)
def optimizer_state_dict_pre(register):
    """(opt); what it changes is saved."""
    _, optimizer = sgd()
    with register(optimizer, lambda o: o.param_groups[0].update(lr=0.5)):
        return optimizer.state_dict()["param_groups"][0]["lr"]


@row("Optimizer.register_state_dict_post_hook", on_optimizer("state_dict_post"), (True, ["param_groups", "state"]))
def optimizer_state_dict_post(register):
    """(opt, sd) → None/another."""
    _, optimizer = sgd()
    with register(optimizer, lambda o, state: {**state, "extra": o is optimizer}):
        state = optimizer.state_dict()
    return state["extra"], sorted(optimizer.state_dict())


@row("Optimizer.register_load_state_dict_pre_hook", on_optimizer("load_state_dict_pre"), (0.25, 1.0))
def optimizer_load_state_dict_pre(register):
    """(opt, sd) → None/another."""
    _, optimizer = sgd()
    state = copy.deepcopy(optimizer.state_dict())
    slower = copy.deepcopy(state)
    slower["param_groups"][0]["lr"] = 0.25
    with register(optimizer, lambda o, given: slower):
        optimizer.load_state_dict(state)
    return optimizer.param_groups[0]["lr"], state["param_groups"][0]["lr"]


@row("Optimizer.register_load_state_dict_post_hook", on_optimizer("load_state_dict_post"), [(True, 0.125)])
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


row("TorchFunctionMode", function_site, ([([ONE, ONE], TWO)], [20.0, 20.0], TWO), FunctionMode)(
    operator(torch.add, lambda: torch.add(torch.ones(2), torch.ones(2)))
)
row("TorchDispatchMode", function_site, ([([[ONE], [[1.0], [1.0]]], [[2.0]])], [[20.0]], [[2.0]]), DispatchMode)(
    operator(torch.ops.aten.mm.default, lambda: torch.ones(1, 2) @ torch.ones(2, 1))
)


@row("unserializable_hook", on_tensor("grad"), [], lambda place, hook: place.register_hook(unserializable_hook(hook)))
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
