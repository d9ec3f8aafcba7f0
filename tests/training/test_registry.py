"""Hooks by name: making them known, listing, selecting, making them; and what a hook is before anybody fires it."""

from __future__ import annotations

import sys
import types

import pytest

from hookline.errors import HooklineWarning, HookNameError, HookSignatureError, OptionError
from hookline.lifecycle.hook import DebugInterventionHook, InterventionHook, TrainingHook
from hookline.lifecycle.registry import HookRegistry
from hookline.when import HookPoint


@pytest.fixture(autouse=True)
def registry(own_registry):
    return own_registry


class Norms(TrainingHook):
    """Lengths of gradients."""

    name = "norms"
    hook_points = {HookPoint.POST_EPOCH}
    needs_grads = True

    def __init__(self, order=2, *, scale=1.0):
        self.order, self.scale = order, scale

    def compute(self, ctx):
        return {}


class Hessian(InterventionHook):
    name = "hessian"
    description = "products with the Hessian"
    hook_points = {HookPoint.SNAPSHOT}

    def intervene(self, run_ctx, model_ctx):
        return {}


class Validator(DebugInterventionHook):
    name = "validator"
    hook_points = {HookPoint.SNAPSHOT}

    def intervene(self, run_ctx, model_ctx):
        return {}


@pytest.fixture
def three(registry):
    for hook in (Norms, Hessian, Validator):
        registry.register(hook)
    return registry


def test_register_gives_the_class_back_untouched_and_makes_no_hook(registry):
    """As a decorator it must not run anybody's __init__."""

    class Explosive(TrainingHook):
        def __init__(self):
            raise AssertionError("made")

        def compute(self, ctx):
            return {}

    before = dict(vars(Explosive))
    assert registry.register(Explosive) is Explosive
    assert registry.register()(Explosive) is Explosive
    assert registry.register("other")(Explosive) is Explosive
    assert dict(vars(Explosive)) == before
    assert registry.known() == ["Explosive", "other"]
    with pytest.raises(AssertionError, match="made"):
        registry.create("other")


def test_the_same_class_again_replaces_and_another_is_an_error(registry):
    """A notebook cell may run twice; two hooks may not share a name."""

    def make():
        class Cell(TrainingHook):
            name = "cell"

            def compute(self, ctx):
                return {}

        return Cell

    first, second = make(), make()
    registry.register(first)
    registry.register(second)
    assert registry.get("cell") is second
    with pytest.raises(HookNameError, match=r"'cell' is taken by .*Cell"):
        registry.register("cell")(Norms)
    assert registry.get("cell") is second


def test_a_hook_that_cannot_be_called_is_refused_when_registered(registry):
    """With what it lacks."""
    for base, method in ((TrainingHook, "compute"), (InterventionHook, "intervene")):
        with pytest.raises(HookSignatureError, match=f"Lacks .* define {method}"):
            registry.register(type("Lacks", (base,), {}))
    assert registry.known() == []


def test_an_argument_that_a_hook_does_not_take_is_named(three):
    with pytest.raises(OptionError, match=r"'norms' takes no 'oder'; it takes order, scale"):
        three.create("norms", {"norms": {"oder": 1}})
    with pytest.raises(OptionError, match=r"'hessian' takes no 'x'; it takes no arguments"):
        three.create("hessian", {"hessian": {"x": 1}})
    with pytest.raises(HookNameError, match=r"'hessian'.*norms"):
        three.create("norms", {"hessian": {}})


def test_a_path_is_imported_when_the_hook_is_asked_for(registry, monkeypatch):
    registry.register_path("elsewhere", "made_up_module_of_hooks:Norms")
    assert registry.known() == ["elsewhere"]
    module = types.ModuleType("made_up_module_of_hooks")
    module.Norms = Norms
    monkeypatch.setitem(sys.modules, "made_up_module_of_hooks", module)
    assert registry.get("elsewhere") is Norms


def test_a_name_that_is_taken_by_a_path_or_a_word_is_refused(registry):
    """Whoever selects it would get something else."""
    registry.register_path("norms", "made_up_module_of_hooks:Norms")
    with pytest.raises(HookNameError, match="'norms' is taken by made_up_module_of_hooks:Norms"):
        registry.register(Norms)
    with pytest.raises(HookNameError, match="'all' is taken by a word that stands for several hooks"):
        registry.register("all")(Hessian)
    registry.add_group("both", ["hessian", "norms"])
    with pytest.raises(HookNameError, match="'both' is taken"):
        registry.register("both")(Hessian)
    for name in ("observers", "norms"):
        with pytest.raises(HookNameError, match=f"{name!r} is taken, so it cannot stand for a group"):
            registry.add_group(name, ["hessian"])


class EntryPoint:
    """What ``importlib.metadata`` finds of another package."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def load(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_hooks_of_other_packages_are_found_by_their_entry_points(registry, monkeypatch):
    """One whose package is broken does not keep the others from being listed."""
    found = [EntryPoint("theirs", Norms), EntryPoint("broken", ImportError("no such thing"))]
    monkeypatch.setattr(HookRegistry, "_has_entry_points", False)
    monkeypatch.setattr(
        "hookline.lifecycle.registry.entry_points", lambda group: found if group == "hookline.hooks" else []
    )
    assert registry.get("theirs") is Norms
    with pytest.raises(ImportError, match="no such thing"):
        registry.get("broken")
    with pytest.warns(HooklineWarning, match="'broken' cannot be loaded .*no such thing"):
        assert registry.list_all() == ["theirs"]


class Plain(TrainingHook):
    hook_points = {HookPoint.POST_EPOCH}

    def compute(self, ctx):
        return {}


def test_a_hook_is_named_after_its_class_unless_it_says_otherwise():
    """One derived from a named hook is another hook, with another name."""

    class Named(Plain):
        name = "named"

    class Derived(Named):
        pass

    assert (Plain.name, Named.name, Derived.name) == ("Plain", "named", "Derived")
    assert repr(Named()) == "<Named 'named'>"
