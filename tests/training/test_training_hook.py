"""What a hook over time is before anybody fires it: names, defaults, and what it says when something is missing."""

from __future__ import annotations

import pytest
import torch

from hookline.errors import HookSignatureError, OptionError
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.when import HookPoint


class Plain(TrainingHook):
    hook_points = {HookPoint.POST_EPOCH}

    def compute(self, ctx):
        return {}


class Acts(InterventionHook):
    hook_points = {HookPoint.POST_EPOCH}

    def intervene(self, run_ctx, model_ctx):
        return {}


def test_a_hook_is_named_after_its_class_unless_it_says_otherwise():
    """One derived from a named hook is another hook, with another name."""

    class Named(Plain):
        name = "named"

    class Derived(Named):
        pass

    assert (Plain.name, Named.name, Derived.name) == ("Plain", "named", "Derived")
    assert repr(Named()) == "<Named 'named'>"


def test_an_unknown_scope_is_refused():
    """With those there are."""

    class Writes(Acts):
        scope = "writes"

    with pytest.raises(OptionError, match=r"'Writes'.*reads, grads, trains.*'writes'"):
        HookManager(hooks=[Writes()])


def test_state_tensors_are_what_is_saved_and_loaded():
    """Unless a hook says otherwise; one without any is not bothered."""

    class Keeps(Plain):
        total = torch.zeros(())

        def get_state_tensors(self):
            return {"total": self.total}

        def set_state_tensors(self, tensors):
            self.total = tensors["total"]

    one, other = Keeps(), Keeps()
    one.total = torch.ones(())
    other.load_state_dict(one.state_dict())
    assert other.total == 1
    assert Plain().state_dict() == {}
    Plain().load_state_dict({})


def test_a_hook_that_gives_state_and_cannot_take_it_back_is_refused():
    """A resumed run would go on without it, and nobody would know; its own load_state_dict will do."""

    class Gives(Plain):
        def get_state_tensors(self):
            return {"total": torch.zeros(())}

    with pytest.raises(HookSignatureError, match=r"Gives hands out get_state_tensors\(\) and cannot take them back"):
        HookManager(hooks=[Gives()])

    class Loads(Gives):
        def load_state_dict(self, state):
            self.total = state["total"]

    HookManager(hooks=[Loads()])
