"""register_module, register_parameter, register_buffer: hooks that run before something is stored in a module."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_waiting import PATIENCE
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hookline as hl

KINDS = ["register_module", "register_parameter", "register_buffer"]
DICTS = {
    "register_module": torch_module._global_module_registration_hooks,
    "register_parameter": torch_module._global_parameter_registration_hooks,
    "register_buffer": torch_module._global_buffer_registration_hooks,
}
FOREIGN = {
    "register_module": torch_module.register_module_module_registration_hook,
    "register_parameter": torch_module.register_module_parameter_registration_hook,
    "register_buffer": torch_module.register_module_buffer_registration_hook,
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


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))


class Calls:
    """A hook that keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Module, str, Any]] = []

    def __call__(self, module: nn.Module, name: str, value: Any) -> None:
        self.seen.append((module, name, value))


# -- when it fires -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["method", "setattr"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_fires_before_what_it_is_shown_is_stored(kind, how):
    """By the method or by assignment: module, name, value, and nothing there yet."""
    module, seen = nn.Identity(), []

    def look(owner: nn.Module, name: str, value: Any) -> None:
        seen.append((owner is module, name, value is guest, stored(kind, module)))

    guest = MAKE[kind]()
    with hl.attach(module, look, on=kind):
        store(kind, module, value=guest) if how == "method" else setattr(module, "guest", guest)
    assert seen == [(True, "guest", True, None)]
    assert stored(kind, module) is guest


def test_a_submodule_comes_by_add_module_too():
    """Also through a Sequential's append and a ModuleDict's item."""
    calls, sequence, table = Calls(), nn.Sequential(), nn.ModuleDict()
    with hl.attach(sequence, calls, on="register_module"), hl.attach(table, calls, on="register_module"):
        sequence.add_module("a", nn.Identity())
        sequence.append(nn.Identity())
        table["c"] = nn.Identity()
    assert [(owner, name) for owner, name, _ in calls.seen] == [(sequence, "a"), (sequence, "1"), (table, "c")]


@pytest.mark.parametrize(("kind", "fires"), [("register_module", 1), ("register_parameter", 0), ("register_buffer", 1)])
def test_none_is_shown_to_module_and_buffer_hooks_only(kind, fires):
    """As in torch, where a parameter of None passes by its hooks."""
    module, calls = nn.Identity(), Calls()
    with hl.attach(module, calls, on=kind):
        CALL[kind](module, "guest", None)
    assert calls.seen == [(module, "guest", None)] * fires
    assert stored(kind, module) is None


def test_a_refusal_of_torch_comes_first():
    """What torch will not store, no hook is shown."""
    module, calls = nn.Identity(), Calls()
    with hl.attach(module, calls, on="register_buffer"):
        with pytest.raises(KeyError):
            module.register_buffer("a.b", torch.ones(1))
        with pytest.raises(TypeError):
            module.register_buffer("a", "no tensor")
    assert calls.seen == []


# -- what it may return --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["method", "setattr"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_returns_is_stored_instead(kind, how):
    """And shown to the hooks after it."""
    module, calls, replacement = nn.Identity(), Calls(), MAKE[kind]()
    with hl.attach(module, lambda *args: replacement, on=kind), hl.attach(module, calls, on=kind):
        guest = MAKE[kind]()
        store(kind, module, value=guest) if how == "method" else setattr(module, "guest", guest)
    assert stored(kind, module) is replacement
    assert [value is replacement for _, _, value in calls.seen] == [True]


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
        hl.attach(module, lambda *args: wrong, on=kind, name="mine"),
        pytest.raises(
            hl.errors.HookReturnError, match=rf"{kind} hook 'mine', shown 'guest'.*a {wanted} or None.*an? {got}"
        ),
    ):
        store(kind, module)
    assert "guest" not in vars(module)[STORES[kind]]
    with hl.attach(module, lambda *args: wrong, on=kind), pytest.raises(RuntimeError):
        module.old = MAKE[kind]()
    assert stored(kind, module, "old") is before


def test_a_replaced_parameter_is_the_one_that_trains():
    """The recipe: every weight that is set from now on is set in half precision."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))

    def halve(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.detach().to(torch.bfloat16))

    with hl.attach(model, "0", halve, on="register_parameter"):
        model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16]
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is not None


# -- order, site, receipt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_site_tells_the_module_its_name_the_kind_and_the_step(kind):
    """A hook that declares site gets one; the step is that of the model's forwards."""
    model, sites = make_model(), []

    def look(module: nn.Module, name: str, value: Any, *, site: hl.Site) -> None:
        sites.append(site)

    with hl.attach(model, "1.0", look, on=kind):
        store(kind, model[1][0])
        model(torch.ones(1))
        model(torch.ones(1))
        store(kind, model[1][0])
        store(kind, model[1][0])
    assert [(site.name, site.module is model[1][0], site.kind, site.step, site.call) for site in sites] == [
        ("1.0", True, hl.Kind(kind), -1, 0),
        ("1.0", True, hl.Kind(kind), 1, 0),
        ("1.0", True, hl.Kind(kind), 1, 1),
    ]


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


def test_process_wide_hooks_may_replace_what_a_constructor_registers():
    """Every layer that is built inside the block gets a wrapper around it."""

    def wrap(module: nn.Module, name: str, child: nn.Module) -> nn.Module | None:
        return nn.Sequential(child) if isinstance(child, nn.Linear) and type(module) is nn.ModuleDict else None

    with hl.attach_everywhere(wrap, on="register_module"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()})
    assert [type(child) for child in model.values()] == [nn.Sequential, nn.ReLU]


def test_process_wide_hooks_take_no_exclude():
    """Names need a model."""
    with pytest.raises(hl.errors.OptionError, match="within="):
        hl.attach_everywhere(Calls(), on="register_module", exclude="0")


# -- coming and going ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_hooks_of_the_process_run_and_stay(kind):
    """Before and after ours, each once, whatever ours return."""
    order: list[str] = []

    def note(text: str) -> Callable[..., None]:
        return lambda *args: order.append(text)

    module = nn.Identity()
    before = FOREIGN[kind](note("before"))
    handle = hl.attach(module, note("ours"), on=kind)
    after = FOREIGN[kind](note("after"))
    store(kind, module)
    handle.remove()
    store(kind, module)
    assert order == ["before", "ours", "after", "before", "after"]
    assert list(DICTS[kind]) == [before.id, after.id]
    before.remove()
    after.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_goes_inside_a_foreign_hooks_walk_does_not_break_it(kind):
    """A foreign hook builds a module; ours, last in the dictionary, goes with that; torch is still at the foreign."""
    module, inner, handles = nn.Identity(), nn.Identity(), []

    def foreign(owner: nn.Module, name: str, value: Any) -> None:
        if owner is module:
            store(kind, inner)

    theirs = FOREIGN[kind](foreign)
    handles.append(hl.attach(inner, lambda *args: handles[0].remove(), on=kind))
    guest = store(kind, module)
    assert stored(kind, module) is guest
    assert handles[0].removed
    theirs.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_register_in_another_module(kind):
    """One walk inside another, each with its own hooks, and the inner one may end both."""
    outer, inner, order = nn.Identity(), nn.Identity(), []

    def nest(*args: Any) -> None:
        order.append("outer")
        store(kind, inner)
        order.append("outer again")

    def leave(*args: Any) -> None:
        order.append("inner")
        handles.remove()

    handles = hl.HandleSet([hl.attach(outer, nest, on=kind), hl.attach(inner, leave, on=kind)])
    store(kind, outer)
    store(kind, outer)
    assert order == ["outer", "inner", "outer again"]
    assert not DICTS[kind]


def test_hooks_come_and_go_while_another_thread_builds_modules():
    """A thread that builds models never notices."""
    errors: list[BaseException] = []
    stop, built = threading.Event(), threading.Event()

    def build() -> None:
        try:
            while not stop.is_set():
                nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
                built.set()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(300):
            hl.HandleSet([hl.attach_everywhere(lambda *args: None, on=kind) for kind in KINDS]).remove()
        built.wait(PATIENCE)
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_removal_in_another_thread_waits_for_torch_to_be_through():
    """A hook that is being run in one thread is taken off in another, while a foreign hook is still to come."""
    module, foreign = nn.Identity(), Calls()
    inside, go_on = threading.Event(), threading.Event()

    def linger(*args: Any) -> None:
        inside.set()
        go_on.wait(PATIENCE)

    handle = hl.attach(module, linger, on="register_buffer")
    theirs = FOREIGN["register_buffer"](foreign)
    thread = threading.Thread(target=store, args=("register_buffer", module))
    thread.start()
    assert inside.wait(PATIENCE)
    handle.remove()
    go_on.set()
    thread.join()
    assert len(foreign.seen) == 1
    assert stored("register_buffer", module) is not None
    theirs.remove()


# -- what torch does -----------------------------------------------------------------------------------------


def test_a_tensor_assigned_over_a_buffer_is_a_registration():
    """As in torch: the name is a buffer's, so the value is stored as one."""
    module, calls = nn.BatchNorm1d(2), Calls()
    with hl.attach(module, calls, on="register_buffer"):
        module.running_mean = torch.ones(2)
    assert [(name, isinstance(value, Tensor)) for _, name, value in calls.seen] == [("running_mean", True)]
