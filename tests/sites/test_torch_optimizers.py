"""What hookline takes for granted of torch's optimizers, and that private names of torch stay in one file."""

from __future__ import annotations

import ast
import pathlib
from collections import OrderedDict

import pytest
import torch
from torch import nn

import hookline
from hookline.sites import _torch
from hookline.sites.kinds import OPTIMIZER


def make_optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return kind([weight], lr=0.1)


OPTIMIZER_KINDS = [kind.value for kind in OPTIMIZER.args]


# -- optimizers -----------------------------------------------------------------------------------------------


def test_every_hook_dictionary_of_an_optimizer_is_known():
    """One per kind, in order of registration, filled by the public call; a new one would be a kind we lack."""
    optimizer = make_optimizer()
    there = {name for name in vars(optimizer) if name.endswith("_hooks")}
    assert there == {f"_optimizer_{kind}_hooks" for kind in OPTIMIZER_KINDS}
    for kind in OPTIMIZER_KINDS:
        handle = getattr(optimizer, f"register_{kind}_hook")(print)
        hooks = _torch.optimizer_hooks(optimizer, kind)
        assert isinstance(hooks, OrderedDict)
        assert hooks == {handle.id: print}
        assert handle.hooks_dict_ref() is hooks
        assert _torch.takes_optimizer_hooks(optimizer, kind)
    assert not _torch.takes_optimizer_hooks(object.__new__(torch.optim.SGD), "step_pre")


@pytest.mark.parametrize("kind", ["step_pre", "step_post"])
def test_an_inner_step_is_told_from_an_outer_one(kind):
    """torch wraps the step of each class in the same code, which has the optimizer in a variable."""

    class Calls(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    other = make_optimizer()  # also makes torch wrap the parent's step
    optimizer = make_optimizer(Calls)
    seen = []
    getattr(optimizer, f"register_{kind}_hook")(lambda opt, args, kwargs: seen.append(_torch.is_inner_step(opt)))
    getattr(other, f"register_{kind}_hook")(lambda opt, args, kwargs: seen.append(_torch.is_inner_step(opt)))
    other.step()
    assert seen == [False]
    seen.clear()
    optimizer.step(lambda: other.step() or 0.0)
    assert sorted(seen) == [False, False, True]  # outer, inner, and the other's
    assert not _torch.is_inner_step(optimizer)


@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_an_optimizers_hooks_are_walked_live_and_the_walk_is_seen(kind):
    """Until the last one has its turn; a hook that leaves before that makes torch fail."""
    optimizer = make_optimizer()
    hooks = _torch.optimizer_hooks(optimizer, kind)
    register = getattr(optimizer, f"register_{kind}_hook")
    seen = []

    def run() -> None:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    first = register(lambda *args: seen.append(_torch.being_walked(hooks)))
    second = register(lambda *args: seen.append(_torch.being_walked(hooks)))
    run()
    assert seen == [True, False]
    assert not _torch.being_walked(hooks)
    first.remove()
    second.remove()
    leaving = register(lambda *args: leaving.remove())
    run()  # alone, it may go
    leaving = register(lambda *args: leaving.remove())
    register(lambda *args: None)
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        run()


# -- the one file ---------------------------------------------------------------------------------------------


def test_private_names_of_torch_are_imported_in_one_file_only():
    """No other file of the package imports from ``torch._C`` or another private module of torch."""
    root = pathlib.Path(hookline.__file__).parent
    offenders = []
    for path in root.rglob("*.py"):
        if path.name.startswith("_torch"):  # what torch does not document, in two files
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                offenders += [f"{path.name}: {name}" for name in names if name.startswith("_")]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                private = node.attr.startswith("_") and node.attr != "__version__"
                offenders += [f"{path.name}: torch.{node.attr}"] if private else []
    assert offenders == []
