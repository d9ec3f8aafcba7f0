"""Every hook that torch has, and the hookline call that does the same.

`pytorch_scenarios` has a scenario for each, and the effect that both must have. What hookline leaves to torch on
purpose is in a table here, with the reason and what happens instead. A test asks torch itself which hooks it has, so
that one that comes with a new version is missed here.
"""

from __future__ import annotations

import functools

import pytest
import torch
from pytorch_scenarios import ROWS, Scale, Weighted, leaf, numbers
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

import hookline as hl


@pytest.fixture(autouse=True)
def _without_what_torch_leaves_behind(monkeypatch):
    """Torch forgets to take the options of a global hook off with it; the next test file must not find them."""
    monkeypatch.setattr(torch_module, "_global_is_full_backward_hook", torch_module._global_is_full_backward_hook)
    yield
    torch_module._global_forward_hooks_with_kwargs.clear()


@pytest.mark.parametrize("row", ROWS, ids=[row.api for row in ROWS])
def test_a_hook_of_torch_has_a_counterpart_with_the_same_effect(row, recwarn):
    """Torch's registration and ours, in the same scenario, both give the effect that the table states."""
    assert row.scenario(row.register_by_torch) == row.effect, "torch itself"
    recwarn.clear()
    assert row.scenario(row.ours) == row.effect
    assert not recwarn.list


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
