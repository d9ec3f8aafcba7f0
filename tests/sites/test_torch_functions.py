"""What hookline takes for granted of torch's dispatcher, modes and tensors; fails when a version changes it."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.sites import _torch

# -- functions and operators ----------------------------------------------------------------------------------


class _Plain(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _PlainDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _modes(stack):
    modes = stack._take_all()
    for mode in reversed(modes):
        stack._push(mode)
    return modes[::-1]


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
            found.append(tuple(_torch.running()))
            return x

    inner = Inner()
    outer = nn.Sequential(nn.Sequential(inner))
    outer(torch.ones(1))
    assert found == [(inner, outer[0], outer)]
    assert list(_torch.running()) == []


def test_what_a_function_mode_is_shown_is_known():
    """Native functions and Python functions that ask for modes; not any other."""
    assert _torch.is_native("relu_", torch.relu_)
    assert _torch.is_native("gelu", torch.nn.functional.gelu)
    assert _torch.handles_modes(torch.nn.functional.softmax)
    assert not _torch.handles_modes(test_what_a_function_mode_is_shown_is_known)
    assert not _torch.is_native("sin", math.sin)


# -- what observers ask ---------------------------------------------------------------------------------------


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
