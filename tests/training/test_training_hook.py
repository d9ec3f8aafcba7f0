"""What a hook over time is before anybody fires it: names, defaults, and what it says when something is missing."""

from __future__ import annotations

import pytest
import torch

from hookline.errors import HookSignatureError, OptionError
from hookline.lifecycle.context import RunDataContext
from hookline.lifecycle.hook import InterventionHook, TrainingHook
from hookline.lifecycle.manager import HookManager
from hookline.lifecycle.registry import check_hook
from hookline.when import HookPoint

CTX = RunDataContext(HookPoint.POST_EPOCH, 0)


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


def test_what_is_left_out_says_what_to_write():
    """When called, and already when it is checked."""
    with pytest.raises(
        NotImplementedError, match=r"TrainingHook has to say what it observes: define compute\(self, ctx\)"
    ):
        TrainingHook().compute(CTX)
    with pytest.raises(NotImplementedError, match=r"define intervene\(self, run_ctx, model_ctx\)"):
        InterventionHook().intervene(CTX, None)
    with pytest.raises(HookSignatureError, match="define compute"):
        check_hook(TrainingHook())
    with pytest.raises(HookSignatureError, match="define intervene"):
        check_hook(InterventionHook)


def test_more_arguments_are_fine_if_they_have_defaults():
    """Whatever can be called may be."""

    class More(InterventionHook):
        def compute(self, ctx, *, window=3):
            return {}

        def intervene(self, *args, **kwargs):
            return {}

    check_hook(More)


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
