"""What hookline takes for granted of torch's optimizers, and that private names of torch stay in one file."""

from __future__ import annotations

import ast
import inspect
import pathlib
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from helpers_waiting import PATIENCE
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


def test_a_walk_in_another_thread_is_seen():
    """All threads' stacks are looked at."""
    optimizer = make_optimizer()
    entered, leave = threading.Event(), threading.Event()

    def wait(*args: object) -> None:
        entered.set()
        assert leave.wait(PATIENCE)

    optimizer.register_step_post_hook(wait)
    optimizer.register_step_post_hook(lambda *args: None)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    assert entered.wait(PATIENCE)
    walked = _torch.being_walked(_torch.optimizer_hooks(optimizer, "step_post"))
    leave.set()
    thread.join()
    assert walked
    assert not _torch.being_walked(_torch.optimizer_hooks(optimizer, "step_post"))


def test_what_is_untraced_runs_as_it_is_in_a_compiled_function():
    """Methods too; the compiler would not know what to do with a stack."""

    class Looks:
        @_torch.untraced
        def __call__(self) -> str:
            return sys._getframe(0).f_code.co_name

    looks = Looks()
    assert looks() == "__call__"
    compiled = torch.compile(lambda x: (x + 1, looks()), backend="eager")
    try:
        assert compiled(torch.ones(1))[1] == "__call__"
    finally:
        torch._dynamo.reset()


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


def test_tensors_without_numbers_of_their_own_are_told_apart():
    """Those that stand for others in a transform, and fake ones; parameters and other subclasses have numbers."""
    found = []

    def note(x):
        found.append(_torch.has_numbers(x))
        return x.sum()

    torch.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        note(torch.ones(2))
    own = torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {}))
    for ordinary in (torch.ones(2), nn.Parameter(torch.ones(2)), own):
        note(ordinary)
    assert found == [False, False, False, True, True, True]


def test_every_name_of_the_file_is_used_and_documented():
    """The file holds what is needed and says why."""
    source = inspect.getsource(_torch)
    assert _torch.__doc__ is not None
    assert "tests/sites/test_torch_" in source
    for name in _torch.__all__:
        value = getattr(_torch, name)
        assert not inspect.isfunction(value) or value.__doc__, name
