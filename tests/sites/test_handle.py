"""Handles: what is switched on comes off again, at once, however it is asked, and leaves nothing."""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from helpers_modules import assert_untouched
from helpers_sites import COPIES, ignore
from torch import nn
from torch.utils.hooks import RemovableHandle

import hookline as hl


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))


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
    assert_untouched(model)


# -- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_model_that_keeps_its_handles_can_be_copied_and_saved(duplicate):
    """Handles stored on the model travel as handles that are off."""
    model = make_model()
    model.handle = hl.attach(model, "0", lambda *args: None)
    model.handles = hl.HandleSet([hl.attach(model, "1", lambda *args: None, on="backward")])
    twin = COPIES[duplicate](model)
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
    assert_untouched(model)


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
