"""What hookline takes for granted of torch's dispatcher, modes and tensors; fails when a version changes it."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.sites import _torch
from hookline.sites.functions.function_names import _SHOWN_AS

# -- functions and operators ----------------------------------------------------------------------------------


class _Plain(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _PlainDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _modes(stack):
    return [stack._at(index) for index in range(stack._height())]


@pytest.mark.parametrize(
    ("stack", "make"),
    [(_torch.FUNCTION_MODES, _Plain), (_torch.DISPATCH_MODES, _PlainDispatch)],
    ids=["functions", "operators"],
)
def test_a_mode_slips_under_others_and_is_taken_out_again(stack, make):
    """The bottom is index 0; others keep their order, and their ``with`` blocks take off their own."""
    ours, first, second = make(), make(), make()
    with first:
        with second:
            stack.slip_under(ours)
            assert _modes(stack) == [ours, first, second]
        assert _modes(stack) == [ours, first]
        assert stack.take_out(ours)
        assert not stack.take_out(ours)
        assert _modes(stack) == [first]
    assert _modes(stack) == []


def test_a_default_device_keeps_the_lowest_place():
    """``torch.set_default_device`` looks for its own mode at the very bottom, and raises if it is not there."""
    ours = _Plain()
    torch.set_default_device("cpu")
    try:
        _torch.FUNCTION_MODES.slip_under(ours)
        assert _modes(_torch.FUNCTION_MODES)[1:] == [ours]
    finally:
        torch.set_default_device(None)
        _torch.FUNCTION_MODES.take_out(ours)
    assert _modes(_torch.FUNCTION_MODES) == []


def test_the_running_modules_are_found_on_the_stack():
    """The innermost first, and none outside of a forward."""
    found = []

    class Inner(nn.Module):
        def forward(self, x):
            found.append((_torch.running_module(), *_torch.all_running()))
            return x

    inner = Inner()
    outer = nn.Sequential(nn.Sequential(inner))
    outer(torch.ones(1))
    assert found == [(inner, inner, outer[0], outer)]
    assert _torch.running_module() is None
    assert _torch.all_running() == []


def test_what_a_function_mode_is_shown_is_known():
    """Native functions and Python functions that ask for modes; not any other."""
    assert _torch.is_native("relu_", torch.relu_)
    assert _torch.is_native("gelu", torch.nn.functional.gelu)
    assert _torch.handles_modes(torch.nn.functional.softmax)
    assert not _torch.handles_modes(test_what_a_function_mode_is_shown_is_known)
    assert not _torch.is_native("sin", math.sin)


def test_what_is_shown_for_the_operators_of_python_is_known():
    """``Tensor.add`` for ``+``, and so on; the others are shown as they are."""
    shown = {}

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            shown[name] = func
            return func(*args, **(kwargs or {}))

    operators = [name for name in dir(torch.Tensor) if re.fullmatch("__[ir]?(add|sub|mul|truediv|mod|ne|lt)__", name)]
    with Recorder():
        for name in operators:
            getattr(torch.Tensor, name)(torch.ones(2), torch.ones(2))
    found = {name: func.__name__ for name, func in shown.items() if func.__name__ != name}
    assert {name: _SHOWN_AS.get(name) for name in found} == found


def test_fake_tensors_are_tracing():
    """Under a fake mode, and only there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not _torch.is_tracing()
    with FakeTensorMode():
        assert _torch.is_tracing()


# -- what observers ask ---------------------------------------------------------------------------------------


def test_a_leaf_has_one_dictionary_of_hooks_for_as_long_as_it_lives():
    """None before the first hook; the same object afterwards, which a handle refers to weakly."""
    leaf = nn.Parameter(torch.ones(2))
    assert _torch.leaf_hooks(leaf) is None
    handle = leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    hooks = _torch.leaf_hooks(leaf)
    assert handle.hooks_dict_ref() is hooks
    handle.remove()
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    assert _torch.leaf_hooks(leaf) is hooks


def test_tensors_inside_transforms_are_told():
    """Under vmap and grad, not outside."""
    told = []

    def function(x):
        told.append(_torch.is_wrapped(x))
        return x.sum()

    torch.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    assert told == [True, True]
    assert not _torch.is_wrapped(torch.ones(1))


def test_a_scaler_has_its_scale_on_the_device():
    """Unread, once it has scaled something; none if it is switched off."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert _torch.scale_of(scaler) is None
    scaler.scale(torch.ones(()))
    assert _torch.scale_of(scaler) == 8.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(torch.ones(()))
    assert _torch.scale_of(off) is None


def test_calls_under_way_are_counted():
    """Of the module itself, in this thread."""

    class Nested(nn.Module):
        def forward(self, depth):
            counts.append(_torch.times_running(self))
            return self(depth - 1) if depth else depth

    counts = []
    module = Nested()
    module.register_forward_hook(lambda *args: None)  # without hooks torch calls forward straight
    module(2)
    assert counts == [1, 2, 3]
    assert _torch.times_running(module) == 0


def test_changes_can_be_counted_behind_a_dispatch_mode_in_inference_mode():
    """There torch counts none (the control), and a copy of what inference mode made does not begin at 0."""
    counts = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            for counting in (nullcontext, _torch.counting_changes):
                before = copied._version
                with counting():
                    copied.add_(1)
                    assert torch.is_inference_mode_enabled()
                counts.append(copied._version - before)
            return function(*args, **(kwargs or {}))

    copied = torch.ones(2).clone()
    with torch.inference_mode():
        with Mode():
            torch.neg(torch.ones(2))
        made = torch.ones(2)
        with torch.inference_mode(False):
            counts.append(made.detach().clone()._version)
    assert counts == [0, 1, 0, 1, 1]


def test_tensors_end_to_end_are_a_vector_of_their_own():
    """Whatever their shapes and strides; kinds of numbers are brought together."""
    given = [torch.arange(6.0).view(2, 3).t(), torch.ones(2, dtype=torch.float64), torch.tensor(7.0)]
    found = _torch.flat(given)
    assert found.tolist() == [0, 3, 1, 4, 2, 5, 1, 1, 7]
    found.zero_()
    assert given[0].sum() == 15


def test_the_backward_hooks_of_one_call_are_a_variable_of_torchs_frame():
    """A forward hook finds them, with a list of pre-hooks that is the call's own."""
    found = []

    def hook(*args: object) -> None:
        found.append(_torch.backward_hooks_of_call(2))

    module = nn.Sigmoid()
    module.register_forward_hook(hook)
    x = torch.zeros(1, requires_grad=True)
    module(x)
    module.register_full_backward_pre_hook(lambda *args: None)
    module(x)
    module(x)
    assert found[0] is None
    assert [type(each) for each in found[1:]] == [torch.utils.hooks.BackwardHook] * 2
    assert isinstance(found[1].user_pre_hooks, list)
    assert found[1].user_pre_hooks is not found[2].user_pre_hooks


@pytest.mark.parametrize("where", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_torch_says_which_modules_it_calls_backward_hooks_for(where, monkeypatch):
    """Those with hooks of their own; with global ones, all."""
    flag = "_global_is_full_backward_hook"  # torch never takes it back
    monkeypatch.setattr(torch_module, flag, getattr(torch_module, flag))
    module, other = nn.Sigmoid(), nn.Sigmoid()
    handle = getattr(module, where)(lambda *args: None)
    assert _torch.has_backward_hooks(module)
    assert not _torch.has_backward_hooks(other)
    handle.remove()
    assert not _torch.has_backward_hooks(module)
    with getattr(torch_module, where.replace("register_", "register_module_"))(lambda *args: None):
        assert _torch.has_backward_hooks(other)
