"""How compiled code notices hooks: what is marked when, and what else of the model and the process stays as it was."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from helpers_compiled import Blocks, breaks, compiled, graphs, observe_all, step
from torch import Tensor, nn

import hookline as hl

pytestmark = [
    pytest.mark.filterwarnings("ignore::hookline.errors.HookNeverFired"),
    # torch's own, where what is compiled takes something that is no leaf, with hooks or without.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def _look(module, *shown) -> None:
    """Returns nothing."""


def _replica(module: nn.Module) -> nn.Module:
    """What ``nn.DataParallel`` makes on each device, here with the parameters of the original."""
    replica = module._replicate_for_data_parallel()
    replica._parameters = dict(module._parameters)
    return replica


class _Stateful(nn.Linear):
    """Says itself what a copy gets, as a class with slots does: a tuple."""

    def __getstate__(self) -> tuple[dict[str, Any], str]:
        return dict(self.__dict__), "slots"

    def __setstate__(self, state: tuple[dict[str, Any], str]) -> None:
        super().__setstate__(state[0])


@pytest.mark.parametrize("options", [{}, {"always_call": True}, {"on": "backward"}, {"on": "state_dict_pre"}], ids=str)
@pytest.mark.parametrize("cls", [nn.Linear, _Stateful])
@pytest.mark.parametrize(
    "make",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), _replica],
    ids=["copy", "deepcopy", "pickle", "replica"],
)
def test_a_copy_of_a_marked_module_computes_with_its_own_parameters(make: Any, cls: Any, options: Any) -> None:
    """While the original has hooks, and after; so does the copy of the copy."""
    compiled(Blocks(1))(torch.randn(3, 4))
    module, x = cls(4, 4), torch.randn(3, 4)
    expected = module(x)
    with hl.attach(module, "", _look, **options):
        twins = [make(module)]
        twins.append(make(twins[0]))
        for twin in twins:
            twin._parameters = {name: torch.zeros(()).expand_as(value) for name, value in twin._parameters.items()}
            assert not twin(x).any()
            assert not twin.forward(x).any()
        assert torch.equal(module(x), expected)
    assert not any(twin(x).any() for twin in twins)
    assert not vars(module).keys() & {"forward", "__getstate__", "_replicate_for_data_parallel"}


def test_a_hooked_model_that_is_marked_dies_with_its_last_reference() -> None:
    """The handle keeps nothing alive."""
    import weakref

    model, x = Blocks(1), torch.randn(3, 4)
    compiled(model)(x)
    handle = hl.attach(model, "*", _look, observe=True)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert handle.report().attached == 0


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


def test_a_compiled_forward_on_the_module_needs_no_mark() -> None:
    """``model.forward = torch.compile(model.forward)``: two graphs, however often hooks come and go."""
    model, x, seen = Blocks(2), torch.randn(3, 4), []
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    own = model.forward
    for _ in range(12):
        with observe_all(model, seen):
            step(model, x)
        step(model, x)
    assert model.forward is own
    assert len(seen) == 12 * 4 * len([m for m in model.modules() if not isinstance(m, nn.ModuleList)])
    assert (graphs(), breaks()) == (2, 0)


def test_code_compiled_before_the_first_hook_is_kept_for_after_the_last() -> None:
    """Unhooked first, then twelve times on and off: two graphs; no switch of torch's is turned."""
    model, x, seen = Blocks(1), torch.randn(3, 4), []
    run = compiled(model)
    step(run, x)
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    for _ in range(12):
        with observe_all(model, seen, "layers.0"):
            step(run, x)
            assert torch._dynamo.config.skip_nnmodule_hook_guards == before
        step(run, x)
    assert len(seen) == 12 * 4
    assert (graphs(), breaks()) == (2, 0)


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
