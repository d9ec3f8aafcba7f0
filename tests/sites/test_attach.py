"""Attaching: what the verb takes, and which calls a hook takes part in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def test_a_hook_may_be_given_by_keyword() -> None:
    """attach(model, hook=f) hooks the model itself."""
    seen = []
    model = _model()
    with hl.attach(model, hook=lambda module, args, output: seen.append(module)):
        model(torch.ones(1, 3))
    assert seen == [model]


def test_a_tuple_of_types_is_a_choice_as_for_isinstance() -> None:
    """A type that does not occur is no error beside one that does; alone it is."""
    model = _model()
    assert hl.find(model, (nn.Linear, nn.Conv2d)).names == ["0", "2"]
    with pytest.raises(hl.errors.NoMatchError, match="Conv2d"):
        hl.find(model, (nn.Conv2d, nn.Conv1d))


@pytest.mark.parametrize("look", [hl.find, hl.attached, hl.assert_no_hooks])
def test_looking_at_what_is_no_module_says_so(look) -> None:
    """A clear error of ours that is also a TypeError."""
    with pytest.raises(TypeError, match="needed, got an int"):
        look(3)


def test_a_gradient_hook_attached_in_the_middle_of_a_call_stays_out_of_it() -> None:
    """From a pre-hook of the same module: it takes part from the next call on, with its grad_input."""
    model, seen, handles = _model(), [], []

    def look(module, grad_input, grad_output):
        seen.append(len(grad_input))

    def late(module, args):
        if not handles:
            handles.append(hl.attach(model, "2", look, on="backward"))

    with hl.attach(model, "2", late, on="forward_pre"):
        model(torch.ones(1, 3)).sum().backward()
        assert seen == []
        model(torch.ones(1, 3)).sum().backward()
    assert seen == [1]
    handles[0].remove()


def test_an_observer_removed_in_a_call_that_raised_does_not_come_back() -> None:
    """The snapshot of a call ends with that call, also when a foreign hook cuts it short."""
    module, events, broken = nn.Identity(), [], [True]
    first = hl.attach(module, lambda m, a, o: events.append("first"), observe=True)
    hl.attach(module, lambda m, a, o: events.append("second"), observe=True)
    hl.attach(module, lambda m, a, o: first.remove())

    def foreign(m, a, o):
        if broken:
            raise ValueError(broken.pop())

    module.register_forward_hook(foreign)
    with pytest.raises(ValueError, match="True"):
        module(torch.ones(1))
    module(torch.ones(1))
    assert events == ["second"]


def test_without_strict_no_match_leaves_the_model_as_it_is():
    """Torch has no hook to call; the handle reports nothing and comes off."""
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(hl.HooklineWarning, match="nothing"):
        handle = hl.attach(model, "nothing", lambda *args: None, strict=False)
    hl.assert_no_hooks(model)
    assert not model._forward_pre_hooks
    model(torch.ones(1, 2))
    assert (handle.report().matched, handle.report().fired) == (0, 0)
    handle.remove()


@pytest.mark.parametrize(
    "call",
    [
        lambda: hl.attach("0", nn.Sequential(nn.ReLU()), print),
        lambda: hl.watch("0", nn.Sequential(nn.ReLU())),
        lambda: hl.capture("0", nn.Sequential(nn.ReLU())),
        lambda: hl.patch({"0": hl.edits.ablate()}, nn.Sequential(nn.ReLU())),
    ],
)
def test_a_model_behind_its_target_is_told(call):
    """By the verbs that take a model."""
    with pytest.raises(hl.errors.UnhookableError, match="the model comes first"):
        call()
