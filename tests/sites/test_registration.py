"""register_module, register_parameter, register_buffer: hooks that run before something is stored in a module."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import hookline as hl

KINDS = ["register_module", "register_parameter", "register_buffer"]
DICTS = {
    "register_module": torch_module._global_module_registration_hooks,
    "register_parameter": torch_module._global_parameter_registration_hooks,
    "register_buffer": torch_module._global_buffer_registration_hooks,
}
MAKE: dict[str, Callable[[], Any]] = {
    "register_module": nn.Identity,
    "register_parameter": lambda: nn.Parameter(torch.ones(1)),
    "register_buffer": lambda: nn.Buffer(torch.ones(1)),
}
CALL: dict[str, Callable[[nn.Module, str, Any], None]] = {
    "register_module": nn.Module.register_module,
    "register_parameter": nn.Module.register_parameter,
    "register_buffer": nn.Module.register_buffer,
}
STORES = {"register_module": "_modules", "register_parameter": "_parameters", "register_buffer": "_buffers"}


@pytest.fixture(autouse=True)
def process_is_left_clean():
    """Whatever a test does, torch's dictionaries of the process are empty after it."""
    yield
    gc.collect()
    hl.assert_no_hooks(nn.Identity())
    assert list(map(dict, DICTS.values())) == [{}, {}, {}]


def store(kind: str, module: nn.Module, name: str = "guest", value: Any = None) -> Any:
    """Have something of that kind stored; what was handed in."""
    value = MAKE[kind]() if value is None else value
    CALL[kind](module, name, value)
    return value


def stored(kind: str, module: nn.Module, name: str = "guest") -> Any:
    return vars(module)[STORES[kind]].get(name)


# -- when it fires, and what it may return ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["method", "setattr"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_fires_before_what_it_is_shown_is_stored_and_what_it_returns_is_stored_instead(kind, how):
    """By the method or by assignment: module, name, value, and nothing there yet; the next hook is shown the other."""
    module, seen, guest, replacement = nn.Identity(), [], MAKE[kind](), MAKE[kind]()

    def look(owner: nn.Module, name: str, value: Any) -> None:
        seen.append((owner is module, name, value, stored(kind, module)))

    def replace(*args: object) -> Any:
        return replacement

    for hooks, observe, expected in (
        ([look], False, [guest]),
        ([look, replace, look], False, [guest, replacement]),
        ([look, replace], True, [guest]),
    ):
        with hl.HandleSet(hl.attach_everywhere(hook, on=kind, observe=observe) for hook in hooks):
            store(kind, module, value=guest) if how == "method" else setattr(module, "guest", guest)
        assert [row[:2] for row in seen] == [(True, "guest")] * len(expected)
        assert [row[2] is value for row, value in zip(seen, expected, strict=True)] == [True] * len(expected)
        assert [row[3] for row in seen] == [None] * len(expected)
        assert stored(kind, module) is expected[-1]
        seen.clear()
        delattr(module, "guest")


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_observer_returns_is_not_stored(kind):
    """And torch has no such hooks for one module: the error names the verb for all."""
    module, guest = nn.Identity(), MAKE[kind]()
    with hl.attach_everywhere(lambda *args: MAKE[kind](), on=kind, observe=True):
        store(kind, module, value=guest)
    assert stored(kind, module) is guest
    with pytest.raises(hl.errors.KindError, match="attach_everywhere"):
        hl.attach(module, print, on=kind)


@pytest.mark.parametrize(
    ("kind", "wrong", "wanted", "got"),
    [
        ("register_module", torch.ones(1), "Module", "Tensor"),
        ("register_parameter", torch.ones(1), "Parameter", "Tensor"),
        ("register_parameter", "junk", "Parameter", "str"),
        ("register_buffer", nn.Identity(), "Tensor", "Identity"),
        ("register_buffer", False, "Tensor", "bool"),
    ],
)
def test_a_wrong_type_is_refused_and_nothing_is_stored(kind, wrong, wanted, got):
    """torch would store it; the error names hook, place and types, and what was there stays."""
    module = nn.Identity()
    before = store(kind, module, "old")
    with (
        hl.attach_everywhere(lambda *args: wrong, on=kind, name="mine"),
        pytest.raises(
            hl.errors.HookReturnError, match=rf"{kind} hook 'mine', shown 'guest'.*a {wanted} or None.*an? {got}"
        ),
    ):
        store(kind, module)
    assert "guest" not in vars(module)[STORES[kind]]
    with hl.attach_everywhere(lambda *args: wrong, on=kind), pytest.raises(RuntimeError):
        module.old = MAKE[kind]()
    assert stored(kind, module, "old") is before


# -- the whole process ---------------------------------------------------------------------------------------


def test_process_wide_hooks_see_modules_that_are_built_later():
    """A layer made inside the block registers its parameters, its parent the layer, BatchNorm its buffers."""
    seen: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}

    def note(module: nn.Module, name: str, value: Any, *, site: hl.Site) -> None:
        seen[str(site.kind)].append((type(module).__name__, name))

    with hl.HandleSet(hl.attach_everywhere(note, on=kind) for kind in KINDS) as handles:
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        assert [receipt.fired for receipt in handles.report()] == [2, 2, 3]
    assert seen == {
        "register_module": [("Sequential", "0"), ("Sequential", "1")],
        "register_parameter": [("Linear", "weight"), ("Linear", "bias")],
        "register_buffer": [("BatchNorm1d", name) for name in ("running_mean", "running_var", "num_batches_tracked")],
    }
    nn.Linear(2, 2)
    assert len(seen["register_parameter"]) == 2
