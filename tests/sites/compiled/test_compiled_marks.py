"""How compiled code notices hooks: what is marked when, and what else of the model and the process stays as it was."""

from __future__ import annotations

import copy
import functools
import inspect
import subprocess
import sys
import textwrap
from types import MethodType
from typing import Any

import pytest
import torch
from helpers_compiled import Blocks, breaks, compiled, graphs, observe_all, step
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired")


def test_a_forward_that_somebody_has_replaced_comes_back_as_it_was() -> None:
    """Hooks fire through it, twelve times on and off make two graphs, and it is the same object in the end."""
    model, x, seen = Blocks(2), torch.randn(3, 4), []
    inner = model.layers[0]

    @functools.wraps(type(inner).forward)
    def patched(y: Tensor) -> Tensor:
        return type(inner).forward(inner, y) * 2

    inner.forward = patched  # type: ignore[method-assign]
    run = compiled(model)
    expected = run(x)
    for _ in range(12):
        with observe_all(model, seen, "layers.0"):
            assert inspect.signature(inner.forward) == inspect.signature(patched)
            assert torch.equal(run(x), expected)
            step(run, x)
        assert inner.forward is patched
        step(run, x)
    assert len(seen) == 12 * (4 + 2)  # one more forward in each round
    assert (graphs(), breaks()) == (2, 0)


def test_a_copy_of_a_hooked_module_calls_a_replaced_forward_on_itself() -> None:
    """As it would without a hook: the method is bound to the copy, and so computes with the weights of the copy."""
    model, called = Blocks(2), []
    inner = model.layers[0]

    def patched(self: nn.Module, y: Tensor) -> Tensor:
        called.append(self)
        return type(self).forward(self, y)

    inner.forward = MethodType(patched, inner)  # type: ignore[method-assign]
    with observe_all(model, [], "layers.0"):
        twin = copy.deepcopy(model)
    twin(torch.randn(3, 4))
    assert called == [twin.layers[0]]
    assert copy.deepcopy(twin).layers[0].forward.__func__ is patched
    assert vars(inner)["forward"].__self__ is inner
    assert "__getstate__" not in vars(inner)


def test_a_copy_keeps_a_wrapper_that_somebody_has_put_around_the_stand_in() -> None:
    """As accelerate does by ``functools.wraps``, which gives the wrapper the attributes of the stand-in."""
    model, called = Blocks(1), []
    inner = model.layers[0]
    own = inner.forward
    inner.forward = lambda y: own(y)  # type: ignore[method-assign]
    handle = observe_all(model, [], "layers.0")
    ours = inner.forward

    @functools.wraps(ours)
    def theirs(y: Tensor) -> Tensor:
        called.append(1)
        return ours(y)

    inner.forward = theirs  # type: ignore[method-assign]
    copy.deepcopy(model)(torch.randn(3, 4))
    assert called == [1]
    handle.remove(quiet=True)
    model(torch.randn(3, 4))
    assert called == [1, 1]


class Stranger(nn.Module):
    """A model of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def _entries(function: Any) -> list[Any]:
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)


def test_attaching_to_one_model_leaves_the_code_of_another_alone() -> None:
    """A stranger keeps its compiled code, to the very object, and the model its own, for later."""
    model, stranger, x = Blocks(1), Stranger(), torch.randn(3, 4)
    run, other = compiled(model), compiled(stranger)
    run(x), other(x)
    kept = [entry.code for entry in _entries(Stranger.forward)]
    assert (len(kept), graphs()) == (1, 2)
    seen: list[Any] = []
    with observe_all(model, seen):
        assert len(_entries(Blocks.forward)) == 1
        assert [entry.code for entry in _entries(Stranger.forward)] == kept
        other(x)
        assert graphs() == 2
        run(x), other(x)
        assert graphs() == 3
    other(x)
    assert [entry.code for entry in _entries(Stranger.forward)] == kept
    assert graphs() == 3


# -- in processes of their own -----------------------------------------------------------------------------

_HEAD = """
import sys, torch
from torch import nn
import hookline as hl

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).relu()

fired = []
def note(module, *shown):
    fired.append(1)
x = torch.randn(3, 4)
"""


def _run(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _HEAD + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hooks_attached_before_the_compiler_is_loaded_fire() -> None:
    """Another instance of the class is compiled first, then the hooked one: it fires, forward and gradient."""
    out = _run("""
        path = list(sys.meta_path)
        model = Model()
        handles = hl.HandleSet(
            [hl.attach(model, "*", note, on=kind, observe=True) for kind in ("forward_pre", "forward", "backward")]
        )
        other = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        other(x).sum().backward()
        other(x)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            run(x).sum().backward()
        print(len(fired), sys.meta_path == path)
        handles.remove()
        run(x).sum().backward()
        print(len(fired), sys.meta_path == path)
        with hl.attach(model, "linear", note, observe=True):
            run(x)
        print(len(fired))
    """)
    assert out.splitlines() == ["12 True", "12 True", "13"]
