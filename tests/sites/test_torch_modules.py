"""What hookline takes for granted of torch's modules beyond their public promises; fails when a version changes it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

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


def test_a_full_backward_hook_sets_a_flag_that_stays():
    """torch never takes it back, so we do."""
    module = nn.Identity()
    assert getattr(module, _torch.FULL_BACKWARD_FLAG) is None
    module.register_full_backward_hook(lambda *args: None).remove()
    assert getattr(module, _torch.FULL_BACKWARD_FLAG) is True


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
