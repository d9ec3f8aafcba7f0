"""PyTorch: hooks that come and go, copies of hooked models, and hooks on saving and loading."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers_models import assert_same_grads, leaf, mlp, twin
from helpers_modules import assert_untouched
from torch import nn

import hookline as hl

FORWARD_KINDS = ["forward_pre", "forward"]


GRADIENT_KINDS = ["backward_pre", "backward"]


RUN_KINDS = [*FORWARD_KINDS, *GRADIENT_KINDS, "full_backward"]


STATE_KINDS = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


def all_kinds(model, target="*"):
    """A hook of every kind and option on the named modules."""
    handles = [hl.attach(model, target, lambda *_: None, on=kind) for kind in RUN_KINDS + STATE_KINDS]
    options = [{"with_kwargs": True}, {"always_call": True}, {"observe": True}, {"prepend": True}]
    handles += [hl.attach(model, target, lambda *_: None, **option) for option in options]
    return hl.HandleSet(handles)


# -- coming and going -----------------------------------------------------------------------------------------


def test_removal_between_forward_and_backward_leaves_nothing_either():
    """The graph of a call made under hooks runs on, and the model is clean before and after it."""
    model, x = mlp(), leaf(4, 3)
    reference, x_reference = copy.deepcopy(model), twin(x)
    handles = all_kinds(model)
    model(x).sum().backward()
    model.load_state_dict(model.state_dict())
    model.zero_grad()
    x.grad = None
    output = model(x)
    handles.remove()
    assert_untouched(model)
    output.square().sum().backward()
    reference(x_reference).square().sum().backward()
    assert_same_grads(model, reference)
    assert torch.equal(x.grad, x_reference.grad)
    assert_untouched(model)


def test_attachment_is_all_or_nothing_when_a_module_refuses():
    """If torch refuses one of many modules, none keeps the hook, and the error comes through."""
    model = mlp()
    legacy = model[2].register_backward_hook(lambda m, gi, go: None)
    with pytest.raises(RuntimeError):
        hl.attach(model, "*", lambda m, gi, go: None, on="full_backward")
    legacy.remove()
    model[2]._is_full_backward_hook = None  # torch's own flag, which it never takes back
    assert_untouched(model)
    assert hl.attached(model) == []


def round_trip_pickle(model):
    return pickle.loads(pickle.dumps(model))


def round_trip_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = pytest.mark.parametrize("make", [copy.deepcopy, round_trip_pickle, round_trip_save])


# -- copies ---------------------------------------------------------------------------------------------------


@COPIES
def test_a_copy_made_under_an_always_call_hook_runs_its_own_forward_and_no_cleanup(make):
    """The copy computes with its own weights, and its errors run no hook of the original's."""
    model, seen, x = mlp(), [], leaf(4, 3)
    hl.attach(model, "*", lambda m, args, out: seen.append(m), always_call=True)
    copied = make(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), torch.zeros(4, 2))
    with pytest.raises(RuntimeError):
        copied(leaf(4, 99))
    assert seen == []
    again = make(copied)
    assert torch.equal(again(x), torch.zeros(4, 2))


@COPIES
def test_a_copy_keeps_the_hooks_of_others_and_saves_and_loads_beside_them(make):
    """A foreign state hook next to ours comes along, as in torch, and state_dict() of the copy works."""
    model = mlp()
    for kind in STATE_KINDS:
        hl.attach(model, kind_hook, on=kind)
    model.register_state_dict_pre_hook(kind_hook)
    model.register_state_dict_post_hook(kind_hook)
    model.register_load_state_dict_pre_hook(kind_hook)
    model.register_load_state_dict_post_hook(kind_hook)
    copied = make(model)
    FOREIGN.clear()
    copied.load_state_dict(copied.state_dict())
    assert len(FOREIGN) == 4
    copied.load_state_dict(copied.state_dict())
    assert len(FOREIGN) == 8


FOREIGN = []


def kind_hook(*args):
    """A module-level hook, which a pickle can carry."""
    FOREIGN.append(args)


@COPIES
@pytest.mark.parametrize("switch", ["freeze", "clip"])
def test_a_model_is_copied_without_warnings_while_gradients_are_frozen_or_clipped(make, switch):
    """hl.freeze and hl.clip_gradients do not stand in the way of copies either, which are free of them."""
    model, x = mlp(), leaf(4, 3)
    handles = hl.freeze(model, "0") if switch == "freeze" else hl.clip_gradients(model, "0", value=1e-6)
    copied = make(model)
    (copied(x) * 10).sum().backward()
    handles.remove()
    reference = mlp()
    (reference(twin(x)) * 10).sum().backward()
    assert_same_grads(copied, reference)


# -- saving and loading ---------------------------------------------------------------------------------------


def test_state_dict_hooks_run_parents_first_before_and_children_first_after():
    """Pre hooks go down the tree, post hooks come up it, on saving and on loading."""
    model, events = nn.Sequential(nn.Sequential(nn.Linear(2, 2))), []
    for kind in STATE_KINDS:

        def hook(module, *args, site):
            events.append((site.kind.value, site.name))

        hl.attach(model, "*", hook, on=kind)
    model.load_state_dict(model.state_dict())
    down, up = ["", "0", "0.0"], ["0.0", "0", ""]
    assert events == [
        *[("state_dict_pre", name) for name in down],
        *[("state_dict_post", name) for name in up],
        *[("load_state_dict_pre", name) for name in down],
        *[("load_state_dict_post", name) for name in up],
    ]


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_bound_methods_are_state_dict_hooks_of_every_kind(kind):
    """A bound method works (torch's state_dict post hook raises AttributeError for one)."""

    class Owner:
        def __init__(self):
            self.calls = 0

        def hook(self, *args):
            self.calls += 1

    owner, model = Owner(), mlp()
    with hl.attach(model, "*", owner.hook, on=kind):
        model.load_state_dict(model.state_dict())
    assert owner.calls == 4
    model.load_state_dict(model.state_dict())
    assert owner.calls == 4
