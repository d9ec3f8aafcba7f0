"""Every hook that torch has, and the hookline call that does the same.

One table: torch's name, how torch registers it, how hookline does, a scenario that takes either, and the effect that
both must have. What hookline leaves to torch on purpose is a second table, with the reason and what happens instead. A
test asks torch itself which hooks it has, so that one that comes with a new version is missed here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pytorch_scenarios import (
    ONE,
    Scale,
    Weighted,
    backward,
    backward_pre,
    everywhere,
    everywhere_backward,
    everywhere_backward_pre,
    everywhere_forward,
    everywhere_forward_always,
    everywhere_forward_pre,
    everywhere_forward_with_kwargs,
    forward,
    forward_always,
    forward_pre,
    forward_pre_with_kwargs,
    forward_with_kwargs,
    leaf,
    load_state_dict_post,
    load_state_dict_pre,
    method,
    numbers,
    on_module,
    on_node,
    on_optimizer,
    on_tensor,
    one_call,
    prepended,
    process,
    registration,
    state_dict_post,
    state_dict_pre,
)
from pytorch_scenarios_below import (
    DispatchMode,
    FunctionMode,
    copied,
    edge,
    function_site,
    multi_all,
    multi_any,
    node_post,
    node_pre,
    one_exercise,
    operator,
    optimizer_load_state_dict_post,
    optimizer_load_state_dict_pre,
    optimizer_state_dict_post,
    optimizer_state_dict_pre,
    post_accumulate,
    saved,
    step_post,
    step_pre,
    tensor_hook,
)
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import unserializable_hook

import hookline as hl


@pytest.fixture(autouse=True)
def _without_what_torch_leaves_behind(monkeypatch):
    """Torch forgets to take the options of a global hook off with it; the next test file must not find them."""
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", torch_module._global_is_full_backward_hook)
    yield
    torch_module._global_forward_hooks_with_kwargs.clear()


# -- the table ----------------------------------------------------------------------------------------------


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


TWO, THREE, FOUR, FIVE, TEN = ([value] * 2 for value in (2.0, 3.0, 4.0, 5.0, 10.0))
SIX, FIFTEEN, TWENTY_FIVE, THIRTY, FORTY, FIFTY = ([value] * 2 for value in (6.0, 15.0, 25.0, 30.0, 40.0, 50.0))
FIRST = ["c", "b", "a", "d"]
BACKWARD = ([(True, [THREE], [ONE])], THIRTY, THREE)
STORED = ([(True, "one", True)], True, True, True)
STATE = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")

MODULE = [
    Row("Module.register_forward_pre_hook", on_module("forward_pre"), forward_pre, ([(True, [ONE])], FIVE, TEN, FIVE)),
    Row("Module.register_forward_pre_hook(prepend=)", on_module("forward_pre"), prepended(one_call), FIRST),
    Row(
        "Module.register_forward_pre_hook(with_kwargs=)",
        on_module("forward_pre"),
        forward_pre_with_kwargs,
        ([([ONE], {"by": 2.0})], TEN, THIRTY),
    ),
    Row("Module.register_forward_hook", on_module("forward"), forward, ([(True, [ONE], FIVE)], FIVE, SIX, FIVE)),
    Row("Module.register_forward_hook(prepend=)", on_module("forward"), prepended(one_call), FIRST),
    Row(
        "Module.register_forward_hook(with_kwargs=)",
        on_module("forward"),
        forward_with_kwargs,
        ([([ONE], {"by": 2.0}, TEN)], [11.0] * 2),
    ),
    Row("Module.register_forward_hook(always_call=)", on_module("forward"), forward_always, [FIVE, None]),
    Row(
        "Module.register_full_backward_pre_hook",
        on_module("backward_pre"),
        backward_pre,
        ([(True, [ONE])], THIRTY, THIRTY),
    ),
    Row("Module.register_full_backward_pre_hook(prepend=)", on_module("backward_pre"), prepended(one_call), FIRST),
    Row("Module.register_full_backward_hook", on_module("backward"), backward, BACKWARD),
    Row("Module.register_full_backward_hook, torch's own way", on_module("full_backward"), backward, BACKWARD),
    Row("Module.register_full_backward_hook(prepend=)", on_module("backward"), prepended(one_call), FIRST),
    Row(
        "Module.register_state_dict_pre_hook",
        on_module("state_dict_pre"),
        state_dict_pre,
        ([(True, "p.", False)], {"p.weight": [7.0] * 2}),
    ),
    Row(
        "Module.register_state_dict_post_hook",
        on_module("state_dict_post"),
        state_dict_post,
        ([(True, ["p.weight"], "p.", 1)], ["p.weight", "p.extra"]),
    ),
    Row(
        "Module._register_state_dict_hook",  # private; what it may return, a hook of ours writes into the dictionary
        on_module("state_dict_post"),
        state_dict_post,
        ([(True, ["p.weight"], "p.", 1)], ["p.weight", "p.extra"]),
    ),
    Row(
        "Module.register_load_state_dict_pre_hook",
        on_module("load_state_dict_pre"),
        load_state_dict_pre,
        ([(True, ["old_weight"], "", True)], FOUR),
    ),
    Row(
        "Module._register_load_state_dict_pre_hook",  # private; with_module=True is how ours are always called
        on_module("load_state_dict_pre"),
        load_state_dict_pre,
        ([(True, ["old_weight"], "", True)], FOUR),
        lambda place, hook: place._register_load_state_dict_pre_hook(hook, with_module=True),
    ),
    Row(
        "Module.register_load_state_dict_post_hook",
        on_module("load_state_dict_post"),
        load_state_dict_post,
        [(True, ["weight"], ["other"])],
    ),
]

GLOBAL = [
    Row(
        "register_module_forward_pre_hook",
        everywhere("forward_pre"),
        everywhere_forward_pre,
        ([("Sequential", [ONE]), ("Scale", [ONE]), ("Scale", [FIVE])], TEN),
    ),
    Row(
        "register_module_forward_hook",
        everywhere("forward"),
        everywhere_forward,
        ([("Scale", FIVE), ("Scale", TWENTY_FIVE), ("Sequential", TWENTY_FIVE)], SIX),
    ),
    Row(
        "register_module_forward_hook(with_kwargs=)",
        everywhere("forward"),
        everywhere_forward_with_kwargs,
        [({"by": 2.0}, TEN)],
    ),
    Row("register_module_forward_hook(always_call=)", everywhere("forward"), everywhere_forward_always, [None]),
    Row(
        "register_module_full_backward_pre_hook",
        everywhere("backward_pre"),
        everywhere_backward_pre,
        ([("Scale", [ONE]), ("Sequential", [ONE]), ("Weighted", [FIVE])], FIFTEEN, FIFTY),
    ),
    Row(
        "register_module_full_backward_hook",
        everywhere("backward"),
        everywhere_backward,
        (
            [("Scale", [FIVE], [ONE]), ("Sequential", [FIFTEEN], [ONE]), ("Weighted", [FIFTEEN], [FIVE])],
            FIFTEEN,
            FIFTY,
        ),
    ),
    Row(
        "register_module_module_registration_hook",
        everywhere("register_module"),
        registration("module", nn.ReLU),
        STORED,
    ),
    Row(
        "register_module_parameter_registration_hook",
        everywhere("register_parameter"),
        registration("parameter", lambda: nn.Parameter(torch.ones(2))),
        STORED,
    ),
    Row(
        "register_module_buffer_registration_hook",
        everywhere("register_buffer"),
        registration("buffer", lambda: torch.ones(2)),
        STORED,
    ),
]

TENSOR = [
    Row("Tensor.register_hook", on_tensor("grad"), tensor_hook, ([THREE, THREE], [61.0] * 2, [121.0] * 2)),
    Row(
        "Tensor.register_post_accumulate_grad_hook",
        on_tensor("param_grad"),
        post_accumulate,
        [(True, FIVE), (True, TEN)],
    ),
    Row(
        "Tensor.register_post_accumulate_grad_hook, by the name of a parameter",
        lambda place, hook: hl.attach(nn.ParameterDict({"x": place}), "x", hook, on="param_grad"),
        post_accumulate,
        [(True, FIVE), (True, TEN)],
    ),
]

GRAPH = [
    Row("Node.register_prehook", on_node("pre"), node_pre, ([[ONE]], FORTY, TEN)),
    Row("Node.register_hook", on_node("post"), node_post, ([([FOUR, ONE], [ONE])], FORTY, None)),
    Row(
        "register_multi_grad_hook(mode='all')",
        on_tensor("grad"),
        multi_all,
        [[TWO, None, THREE]],
        graph.register_multi_grad_hook,
    ),
    Row("register_multi_grad_hook(mode='any')", on_tensor("grad"), multi_any, [THREE], graph.register_multi_grad_hook),
    Row("saved_tensors_hooks", hl.saved_tensors, saved, ([THREE], [11.0] * 2), graph.saved_tensors_hooks),
    Row("get_gradient_edge", on_node("pre"), edge, [[TWO]], lambda place, hook: place.node.register_prehook(hook)),
]

OPTIMIZER = [
    Row(
        "Optimizer.register_step_pre_hook",
        on_optimizer("step_pre"),
        step_pre,
        ([(True, 1, {}, ONE)], 5.0, [-1.0, -1.0]),
    ),
    Row(
        "Optimizer.register_step_post_hook",
        on_optimizer("step_post"),
        step_post,
        [(True, 1, {}, [0.0, 0.0])],
    ),
    Row(
        "Optimizer.register_state_dict_pre_hook",
        on_optimizer("state_dict_pre"),
        optimizer_state_dict_pre,
        0.5,
    ),
    Row(
        "Optimizer.register_state_dict_post_hook",
        on_optimizer("state_dict_post"),
        optimizer_state_dict_post,
        (True, ["param_groups", "state"]),
    ),
    Row(
        "Optimizer.register_load_state_dict_pre_hook",
        on_optimizer("load_state_dict_pre"),
        optimizer_load_state_dict_pre,
        (0.25, 1.0),
    ),
    Row(
        "Optimizer.register_load_state_dict_post_hook",
        on_optimizer("load_state_dict_post"),
        optimizer_load_state_dict_post,
        [(True, 0.125)],
    ),
    *(
        Row(f"Optimizer.register_{kind}_hook(prepend=)", on_optimizer(kind), prepended(one_exercise), FIRST)
        for kind in STATE
    ),
    Row(
        "register_optimizer_step_pre_hook",
        everywhere("step_pre"),
        step_pre,
        ([(True, 1, {}, ONE)], 5.0, [-1.0, -1.0]),
    ),
    Row("register_optimizer_step_post_hook", everywhere("step_post"), step_post, [(True, 1, {}, [0.0, 0.0])]),
]

OTHER = [
    Row(
        "TorchFunctionMode",
        function_site,
        operator(torch.add, lambda: torch.add(torch.ones(2), torch.ones(2))),
        ([([ONE, ONE], TWO)], [20.0, 20.0], TWO),
        FunctionMode,
    ),
    Row(
        "TorchDispatchMode",
        function_site,
        operator(torch.ops.aten.mm.default, lambda: torch.ones(1, 2) @ torch.ones(2, 1)),
        ([([[ONE], [[1.0], [1.0]]], [[2.0]])], [[20.0]], [[2.0]]),
        DispatchMode,
    ),
    Row(
        "unserializable_hook",
        on_tensor("grad"),
        copied,
        [],
        lambda place, hook: place.register_hook(unserializable_hook(hook)),
    ),
]

ROWS = [*MODULE, *GLOBAL, *TENSOR, *GRAPH, *OPTIMIZER, *OTHER]


@pytest.mark.parametrize("row", ROWS, ids=[row.api for row in ROWS])
def test_a_hook_of_torch_has_a_counterpart_with_the_same_effect(row, recwarn):
    """Torch's registration and ours, in the same scenario, both give the effect that the table states."""
    assert row.scenario(row.register_by_torch) == row.effect, "torch itself"
    recwarn.clear()
    assert row.scenario(row.ours) == row.effect
    assert not recwarn.list


# -- what is left to torch ----------------------------------------------------------------------------------


def refused_as_legacy(put):
    """The error points to the kind that does what the name promises."""
    for kind in ("register_backward_hook", "backward_hook", "legacy_backward"):
        with pytest.raises(hl.errors.KindError, match=r"deprecated.*use on='backward'"):
            put(kind)


def module_backward_hook():
    """Refused, with a pointer; the replacement reports the module's own gradients."""
    refused_as_legacy(lambda kind: hl.attach(Weighted(), lambda *_: None, on=kind))


def global_backward_hook():
    """The same for the process."""
    refused_as_legacy(lambda kind: hl.attach_everywhere(lambda *_: None, on=kind))


def retain_grad():
    """A tensor hook sees that gradient without keeping it; beside one, retain_grad works as ever."""
    hidden, seen = leaf() * 2, []
    hl.attach_tensor(hidden, lambda grad: seen.append(grad))
    hidden.retain_grad()
    (hidden * 3).sum().backward()
    assert numbers(seen) == [[3.0] * 2]
    assert torch.equal(hidden.grad, seen[0])


def save_on_cpu():
    """Torch's scope nests with ours: the inner one is asked; and as a pair of functions it goes through ours."""
    x, packed = torch.full((2,), 3.0, requires_grad=True), []
    with hl.saved_tensors(lambda tensor: packed.append("ours") or tensor, lambda tensor: tensor):
        with graph.save_on_cpu():
            y = x * x.detach()
        z = x * x.detach()
    with graph.save_on_cpu(), hl.saved_tensors(lambda t: (t.device, t.to("cpu")), lambda p: p[1].to(p[0])) as scope:
        w = x * x.detach()
    (y + z + w).sum().backward()
    assert packed == ["ours"]
    assert scope.packed == scope.unpacked == 1
    assert numbers(x.grad) == [9.0] * 2


def disable_saved_tensors_hooks():
    """Where torch forbids such hooks our scope is not entered, and torch's message comes out."""
    scope = hl.saved_tensors(lambda tensor: tensor, lambda tensor: tensor)
    with graph.disable_saved_tensors_hooks("not in here"), pytest.raises(RuntimeError, match="not in here"):
        scope.__enter__()
    with scope:
        leaf().exp()
    assert scope.packed == 1


def allow_mutation_on_saved_tensors():
    """A mode of autograd and no hook; hooks of ours inside it leave its gradients right."""
    x, seen = torch.full((2,), 3.0, requires_grad=True), []
    with graph.allow_mutation_on_saved_tensors():
        y = x * 1
        hl.attach_tensor(y, lambda grad: seen.append(numbers(grad)))
        hl.attach_node(y, lambda grads: None, on="pre")
        z = y**2
        with torch.no_grad():
            y.fill_(100.0)
        z.sum().backward()
    assert numbers(x.grad) == [6.0] * 2
    assert seen == [[6.0] * 2]


def no_such_kind(kind):
    """Asked for by name, it is no kind, and the error lists those that there are."""
    with pytest.raises(hl.errors.KindError, match="Kinds: forward_pre, forward"):
        hl.attach(Scale(), lambda *_: None, on=kind)


def fx_graph_hooks():
    """They watch a graph being edited; what runs is a module like any other, and is hooked as one."""
    no_such_kind("create_node")
    traced, seen = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh())), []
    with hl.attach(traced, "*", lambda m, args, out, *, site: seen.append(site.name)):
        traced(torch.ones(2))
    assert seen == ["0", "1", ""]


def script_module():
    """TorchScript runs no Python hooks: refused when attaching, and not silently dead."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(hl.errors.UnhookableError):
        hl.attach(scripted, lambda m, args, out: None)


WITHOUT = {
    "Module.register_backward_hook": ("reports the last operation's gradients", module_backward_hook),
    "register_module_backward_hook": ("reports the last operation's gradients", global_backward_hook),
    "Tensor.retain_grad": ("a flag on a tensor, not a hook", retain_grad),
    "save_on_cpu": ("a ready-made pair for saved_tensors", save_on_cpu),
    "disable_saved_tensors_hooks": ("torch's switch, which we obey", disable_saved_tensors_hooks),
    "allow_mutation_on_saved_tensors": ("a mode of autograd, not a hook", allow_mutation_on_saved_tensors),
    "DistributedDataParallel.register_comm_hook": (
        "replaces the reduction of a bucket between processes: how gradients travel, and not a place in the model",
        functools.partial(no_such_kind, "comm_hook"),
    ),
    "fx.GraphModule hooks": ("watch a graph being edited, not a run", fx_graph_hooks),
    "PackageExporter hooks": ("watch a file being written, not a run", functools.partial(no_such_kind, "extern_hook")),
    "ScriptModule.register_forward_hook": ("TorchScript runs no Python hooks", script_module),
}


@pytest.mark.parametrize("api", WITHOUT)
def test_a_hook_that_is_left_to_torch_is_answered_as_documented(api):
    """Refused with a pointer, or working beside ours; never silently dead."""
    reason, check = WITHOUT[api]
    assert reason
    check()


@pytest.mark.parametrize(
    ("prefix", "owner"),
    [
        ("Module.", nn.Module),
        ("", torch_module),
        ("Tensor.", torch.Tensor),
        ("Node.", graph.Node),
        ("", graph),
        ("Optimizer.", Optimizer),
        ("", torch_optimizer),
    ],
    ids=["Module", "module", "Tensor", "Node", "graph", "Optimizer", "optimizer"],
)
def test_every_registration_that_torch_offers_is_in_one_of_the_tables(prefix, owner):
    """Asked of torch itself: a hook that a new version brings is missed here."""
    offered = {name for name in dir(owner) if "hook" in name and "register" in name and callable(getattr(owner, name))}
    offered |= {name for name in getattr(owner, "__all__", ()) if "saved" in name or "save_on" in name}
    offered -= {"_register_hook_dict", "_register_logging_hooks_on_whole_graph"}  # torch's own plumbing
    named = {row.name for row in ROWS} | set(WITHOUT)
    assert offered
    assert {prefix + name for name in offered} <= named
