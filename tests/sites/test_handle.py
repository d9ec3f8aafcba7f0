"""Handles: what is switched on comes off again, at once, however it is asked, and leaves nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

import hookline as hl
from hookline.sites._torch import HOOK_DICTS, parameter_hooks_of
from hookline.sites.gradients.backward_call import tap_output
from hookline.sites.modules import module_hooks as tables

RUN_KINDS = ["forward_pre", "forward", "backward_pre", "backward", "full_backward"]
GLOBAL_DICTS = [
    torch_module._global_module_registration_hooks,
    torch_module._global_parameter_registration_hooks,
    torch_module._global_buffer_registration_hooks,
]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))


def ignore(*args: object) -> None:
    """A hook of any kind that does nothing."""


def exercise(model: nn.Module) -> None:
    """Run whatever can fire a hook of any kind, once on each module."""
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())
    for module in list(model.modules()):
        module.add_module("guest", nn.Identity())
        del module.guest
        module.register_parameter("guest", nn.Parameter(torch.ones(1)))
        del module.guest
        module.register_buffer("guest", torch.ones(1))
        del module.guest


def assert_no_trace(model: nn.Module, *, alone: bool = True) -> None:
    """Every dictionary of torch's is empty, those of the process if the model is alone, and the instances are bare."""
    for module in model.modules():
        for attribute, extras in HOOK_DICTS.items():
            for name in (attribute, *extras):
                assert not getattr(module, name), (name, module)
        assert "_call_impl" not in vars(module)
        assert "forward" not in vars(module)
        assert tables.existing_hooks(module) is None
        assert list(parameter_hooks_of(module)) == []
    assert GLOBAL_DICTS == [{}, {}, {}] or not alone
    hl.assert_no_hooks(model, foreign=True)


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: object) -> None:
        self.calls += 1


# -- removing ------------------------------------------------------------------------------------------------


def test_a_hook_may_remove_all_others_while_firing():
    """Whatever the current call does with them, none fires in the next one."""
    model, others = make_model(), [Counter() for _ in range(4)]
    handles = []

    def clear(*args: object) -> None:
        for handle in handles:
            handle.remove()

    handles += [hl.attach(model, "*", other, on=kind) for other, kind in zip(others, RUN_KINDS, strict=False)]
    mine = hl.attach(model, "1", clear, on="forward_pre", prepend=True)
    exercise(model)
    after_first = [other.calls for other in others]
    exercise(model)
    assert [other.calls for other in others] == after_first
    mine.remove()
    assert_no_trace(model)


# -- weak to the model ---------------------------------------------------------------------------------------


def test_activations_go_when_the_graph_goes():
    """Gradient hooks keep no tensor beyond the backward that made it."""
    model = make_model()
    with hl.attach(model, "*", ignore, on="backward"), hl.attach(model, "*", ignore, on="backward_pre"):
        x = torch.ones(1, 2, requires_grad=True) * 2
        references = [weakref.ref(x)]
        output = model(x)
        references.append(weakref.ref(output))
        output.sum().backward()
        del output, x
        gc.collect()
        assert [reference() for reference in references] == [None, None]


# -- sets ----------------------------------------------------------------------------------------------------


class Recorder(RemovableHandle):
    """A handle that notes its removal and may fail at it."""

    def __init__(self, name: str, log: list[str], error: BaseException | None = None) -> None:
        super().__init__(OrderedDict())
        self.name, self.log, self.error = name, log, error

    def remove(self) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error


def test_a_failing_member_does_not_keep_the_others_on():
    """Every handle is removed, then the first error is raised."""
    model, log = make_model(), []
    first, second = ValueError("first"), ValueError("second")
    handles = hl.HandleSet(
        [
            hl.attach(model, "0", ignore),
            Recorder("a", log, second),
            Recorder("b", log, first),
            hl.attach(model, "1", ignore),
        ]
    )
    with pytest.raises(ValueError, match="first"):
        handles.remove()
    assert log == ["b", "a"]
    assert_no_trace(model)


def test_the_repr_is_one_short_line():
    """A handle says what it is, where it is and what it did."""
    model = make_model()
    handle = hl.attach(model, "0", ignore)
    assert repr(handle) == "<HookHandle ignore forward on '0', fired 0; on, .remove() takes it off>"
    model(torch.ones(1, 2))
    handle.remove()
    assert repr(handle) == "<HookHandle ignore forward on '0', fired 1; off>"
    with hl.attach(model, "*", ignore, on="backward", name="watcher") as many:
        assert repr(many) == "<HookHandle watcher backward on 5 modules, fired 0; on, .remove() takes it off>"
        assert many.names == ("", "0", "1", "2", "2.0")
        assert many.name == "watcher"


# -- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_a_copied_handle_is_one_that_is_off(duplicate):
    """Removing a copy does not touch the original's hook."""
    model, counter = make_model(), Counter()
    handle = hl.attach(model, "0", counter, name="mine")
    other = duplicate(handle)
    assert other.removed
    assert other.name == "mine"
    other.remove()
    model(torch.ones(1, 2))
    assert counter.calls == 1
    assert repr(other).endswith("; off>")
    handle.remove()


def roundtrip_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def roundtrip_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, roundtrip_pickle, roundtrip_torch])
def test_a_model_that_keeps_its_handles_can_be_copied_and_saved(duplicate):
    """Handles stored on the model travel as handles that are off."""
    model = make_model()
    model.handle = hl.attach(model, "0", lambda *args: None)
    model.handles = hl.HandleSet([hl.attach(model, "1", lambda *args: None, on="backward")])
    twin = duplicate(model)
    assert twin.handle.removed
    assert all(handle.removed for handle in twin.handles)
    exercise(twin)
    twin.handle.remove()
    twin.handles.remove()
    assert not model.handle.removed
    exercise(model)
    assert model.handle.report().fired == 1
    model.handle.remove()
    model.handles.remove()
    assert_no_trace(model)


def test_a_call_of_a_thread_that_was_overtaken_keeps_no_hook_from_firing():
    """Between the forward of one thread and its end, another takes all hooks off, or puts others on."""
    linear, fired = nn.Linear(2, 2), []
    x = torch.ones(1, 2)

    def attach(name: str) -> hl.sites.HookHandle:
        return hl.attach(linear, lambda module, grads: fired.append(name), on="backward_pre", observe=True)

    first = attach("first")
    linear(x).sum().backward()
    hooks = tables.existing_hooks(linear)
    overtaken = hooks.output_call
    first.remove()
    assert overtaken is not None
    assert tap_output(
        hooks, (threading.get_ident(), 1 << 62, 0), linear, linear(x)
    )  # the hooks are gone, and nothing is watched
    second = attach("second")
    tables.existing_hooks(linear).output_call = overtaken  # left by a thread that has read the old hooks
    linear(x).sum().backward()
    second.remove()
    assert fired == ["first", "second"]


def test_a_hook_on_a_shallow_copy_leaves_those_of_the_original_on():
    """Both have the same dictionaries of torch's, so they share all hooks, also when the original is gone."""
    original, fired = nn.Linear(2, 2), []
    hl.attach(original, lambda *args: fired.append("first"), observe=True)
    twin = copy.copy(original)
    hl.attach(twin, lambda *args: fired.append("second"), observe=True)
    original(torch.ones(1, 2))
    assert fired == ["first", "second"]
    del original
    gc.collect()
    third = hl.attach(twin, lambda *args: fired.append("third"), observe=True)
    twin(torch.ones(1, 2))
    assert fired == ["first", "second", "first", "second", "third"]
    assert third.report().fired == 1
    for handle in hl.attached(twin):
        handle.remove(quiet=True)
    assert_no_trace(twin)


def test_a_forward_hook_of_others_on_a_part_called_alone_is_passed_from_the_second_call_on():
    """Called through its model, it is noticed at once."""
    for through_model in (False, True):
        model, seen = nn.Sequential(nn.Linear(2, 2)), []
        with hl.attach(
            model, "0", lambda module, args, output, seen=seen: seen.append(output.sum().item()), observe=True
        ):
            model[0].register_forward_hook(lambda module, args, output: output * 0)
            for _ in range(2):
                (model if through_model else model[0])(torch.ones(1, 2))
        assert seen[1] == 0
        assert (seen[0] == 0) is through_model


def test_a_hook_is_found_when_what_it_was_on_is_gone() -> None:
    """So that it comes off, and with it what counts the forwards of the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hl.attach(model, "1.weight", lambda parameter: None, on="param_grad")
    del model[1]
    gc.collect()
    assert model._forward_pre_hooks
    for handle in hl.attached(model):
        handle.remove(quiet=True)
    assert not model._forward_pre_hooks
