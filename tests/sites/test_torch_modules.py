"""What hookline takes for granted of torch's modules beyond their public promises; fails when a version changes it."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import hookline
from hookline.sites import _torch


def test_a_call_looks_its_implementation_up_on_the_instance():
    """An attribute of that name wraps the whole call, hooks included."""
    model = nn.Identity()
    log = []
    model.register_forward_hook(lambda *args: log.append("hook"))

    def wrapped(*args: object, **kwargs: object) -> object:
        log.append("before")
        result = type(model)._call_impl(model, *args, **kwargs)
        log.append("after")
        return result

    vars(model)[_torch.CALL_IMPL] = wrapped
    model(torch.ones(1))
    assert log == ["before", "hook", "after"]
    del vars(model)[_torch.CALL_IMPL]
    model.forward(torch.ones(1))
    assert log == ["before", "hook", "after"]


def test_every_hook_dictionary_exists_and_none_is_missing():
    """A new dictionary of hooks in torch's Module would be one that find() does not look into."""
    module = nn.Identity()
    known = set(_torch.HOOK_DICTS) | {name for extras in _torch.HOOK_DICTS.values() for name in extras}
    there = {name for name, value in vars(module).items() if name.endswith("_hooks") or isinstance(value, OrderedDict)}
    assert {name for name in there if "hook" in name} == known


def test_hook_dictionaries_are_ordered_dictionaries():
    """They can be reordered in place."""
    module = nn.Identity()
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        assert isinstance(getattr(module, name), OrderedDict)


@pytest.mark.parametrize(
    ("attribute", "register", "options"),
    [
        ("_forward_pre_hooks", "register_forward_pre_hook", {"with_kwargs": True}),
        ("_forward_hooks", "register_forward_hook", {"with_kwargs": True}),
        ("_forward_hooks", "register_forward_hook", {}),
        ("_backward_hooks", "register_full_backward_hook", {}),
        ("_state_dict_pre_hooks", "register_state_dict_pre_hook", {}),
        ("_load_state_dict_pre_hooks", "register_load_state_dict_pre_hook", {}),
        ("_load_state_dict_post_hooks", "register_load_state_dict_post_hook", {}),
    ],
)
def test_put_hook_does_what_torchs_own_registration_does(attribute, register, options):
    """Same dictionaries, same kinds of values; another hook under the id takes its place; dropping leaves nothing."""

    def hook(*args: object) -> None:
        """Does nothing."""

    theirs, ours = nn.Identity(), nn.Identity()
    getattr(theirs, register)(hook, **options)
    for given in (print, hook):
        _torch.put_hook(ours, attribute, -1, given, **options)
    assert [each[2] for each in _torch.hooks_of(ours)] == [each[2] for each in _torch.hooks_of(theirs)] == [hook]
    assert getattr(ours, _torch.FULL_BACKWARD_FLAG) is getattr(theirs, _torch.FULL_BACKWARD_FLAG)
    for name in (attribute, *_torch.HOOK_DICTS[attribute]):
        assert list(map(type, getattr(theirs, name).values())) == list(map(type, getattr(ours, name).values()))
        assert list(getattr(ours, name)) in ([-1], [])
    for _ in range(2):
        _torch.drop_hook(ours, attribute, -1)
        for name in (attribute, *_torch.HOOK_DICTS[attribute]):
            assert not getattr(ours, name)


def test_a_hook_is_placed_first_or_last():
    """Either end of the queue, whatever is there."""
    module = nn.Identity()
    module.register_forward_hook(print)
    _torch.put_hook(module, "_forward_hooks", -1, len)
    _torch.place_first(module._forward_hooks, -1)
    assert next(iter(module._forward_hooks)) == -1
    _torch.place_last(module._forward_hooks, -1)
    assert list(module._forward_hooks)[-1] == -1


def test_hooks_of_lists_every_dictionary_and_unwraps():
    """What was registered comes out, also where torch keeps it in a wrapper."""

    def hook(*args: object) -> None:
        """Does nothing."""

    module = nn.Identity()
    module.register_forward_pre_hook(hook)
    module.register_forward_hook(hook)
    module.register_full_backward_pre_hook(hook)
    module.register_full_backward_hook(hook)
    module.register_state_dict_pre_hook(hook)
    module.register_state_dict_post_hook(hook)
    module.register_load_state_dict_pre_hook(hook)
    module.register_load_state_dict_post_hook(hook)
    found = list(_torch.hooks_of(module))
    assert [attribute for attribute, _, _ in found] == list(_torch.HOOK_DICTS)
    assert all(each is hook for _, _, each in found)


def test_a_full_backward_hook_sets_a_flag_that_stays():
    """torch never takes it back, so we do."""
    module = nn.Identity()
    assert getattr(module, _torch.FULL_BACKWARD_FLAG) is None
    module.register_full_backward_hook(lambda *args: None).remove()
    assert getattr(module, _torch.FULL_BACKWARD_FLAG) is True


def test_a_module_without_hooks_calls_its_forward_straight():
    """torch's own fast path: nothing between the call and the forward."""
    frames = []

    class Looks(nn.Module):
        def forward(self) -> None:
            frame = sys._getframe(1)
            frames.append(frame.f_code.co_name)

    model = Looks()
    model()
    handle = hookline.attach(model, lambda *args: None)
    model()
    handle.remove()
    model()
    assert frames == ["_call_impl", "inner", "_call_impl"]


def test_the_keyword_arguments_are_a_variable_of_the_caller_of_a_global_pre_hook():
    """torch hands a global pre-hook no keywords, but they are there, and changing them changes the call."""
    seen = []

    def outer(module: nn.Module, args: object) -> None:
        middle()

    def middle() -> None:
        # Called at the depth at which ``everywhere`` calls it.
        kwargs = _torch.kwargs_of_call()
        seen.append(dict(kwargs))
        kwargs["b"] = 3

    class Takes(nn.Module):
        def forward(self, *, a: int, b: int) -> tuple[int, int]:
            return a, b

    handle = torch_module.register_module_forward_pre_hook(outer)
    try:
        assert Takes()(a=1, b=2) == (1, 3)
    finally:
        handle.remove()
    assert seen == [{"a": 1, "b": 2}]


def test_in_run_is_true_inside_a_call_or_a_backward_and_false_outside():
    """With and without hooks, in the forward, in a hook, and while gradients flow."""
    seen = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(_torch.in_run())
            return x * 1

    model = Asks()
    assert not _torch.in_run()
    model(torch.ones(1))
    model.register_forward_hook(lambda *args: seen.append(_torch.in_run()))
    output = model(torch.ones(1, requires_grad=True))
    assert seen == [True, True, True]
    assert not _torch.in_run()
    output.register_hook(lambda grad: seen.append(_torch.in_run()))
    output.backward()
    assert seen == [True, True, True, True]
    assert not _torch.in_run()


def test_the_caller_of_an_instances_implementation_is_that_instance():
    """What stands in for ``_call_impl`` can tell a shallow copy, which shares it, from the original."""
    seen = []

    def guard(*args: object, **kwargs: object) -> None:
        seen.append(_torch.caller())

    model = nn.Identity()
    vars(model)[_torch.CALL_IMPL] = guard
    twin = copy.copy(model)
    model(torch.ones(1))
    twin(torch.ones(1))
    assert seen[0] is model
    assert seen[1] is twin


def test_the_same_keyword_dictionary_goes_from_pre_hook_to_post_hook():
    """What a pre-hook returns as kwargs is the very object that a post-hook gets."""

    class Marked(dict):
        """Carries something along."""

    model = nn.Identity()
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, Marked(kwargs)), with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, output: seen.append(type(kwargs)), with_kwargs=True)
    model(torch.ones(1))
    assert seen == [Marked]


def test_forward_hooks_are_taken_as_a_snapshot_but_state_hooks_are_walked_live():
    """Why a state hook of ours may not leave in the middle of a walk."""
    model = nn.Identity()
    handles = []
    handles.append(model.register_forward_hook(lambda *args: handles[0].remove()))
    model.register_forward_hook(lambda *args: None)
    model(torch.ones(1))
    state = []
    state.append(model.register_state_dict_pre_hook(lambda *args: state[0].remove()))
    model.register_state_dict_pre_hook(lambda *args: None)
    with pytest.raises(RuntimeError, match="mutated during iteration"):
        model.state_dict()


def test_the_state_hook_dictionary_marks_public_hooks_by_an_attribute():
    """A bound method would not take it, a port does."""

    class Marks:
        def __call__(self, *args: object) -> None:
            """Does nothing."""

    hook = Marks()
    nn.Identity().register_state_dict_post_hook(hook)
    assert hook._from_public_api is True
