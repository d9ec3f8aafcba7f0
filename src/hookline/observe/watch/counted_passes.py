"""Decide whether what comes by counts for a watch: by its schedule, its pauses and ``during=``.

Asked by the hooks of a watch at each firing; knows the model's forwards from their `ForwardCounter`, and the watch's
steps."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hookline.errors import HooklineWarning
from hookline.lifecycle.run_phase import phase
from hookline.messages import caller_stacklevel, type_name
from hookline.observe.watch.watch_steps import ByForward, Steps
from hookline.sites.attach import new_attachment
from hookline.sites.modules.forward_counter import NO_MODEL, ForwardCounter
from hookline.sites.modules.module_hooks import existing_hooks

if TYPE_CHECKING:
    from torch import nn

    from hookline.lifecycle.run_phase import During
    from hookline.observe.watch.stats_engine import Watched
    from hookline.sites.hook_at_site import Attachment
    from hookline.sites.kinds import Kind

__all__ = ["Counts"]


class Counts:
    """What counts for one watch of `model`."""

    def __init__(self, model: nn.Module, during: During, steps: Steps) -> None:
        self.during = during
        self.steps = steps
        """What a step is; replaced when the user begins to tell of steps."""
        self.paused = 0
        self.root: ForwardCounter = NO_MODEL
        self._model = model
        self._is_in_parts = False

    def find_root(self) -> None:
        """Go by what counts the forwards of the model now; it changes when all hooks were off."""
        table = existing_hooks(self._model)
        self.root = NO_MODEL if table is None or table.counter is None else table.counter

    def request(self, hook: Any, kind: Kind, name: str) -> Attachment:
        """Return what asks for an observer; where it comes on because a step begins, it is as old as the step.

        A gradient hook that comes on in the middle of a forward waits for the next one, and a step begins in the
        pre-hooks of the forward that is due.
        """
        request = new_attachment(hook, kind, observe=True, name=name)
        if isinstance(self.steps, ByForward) and self.steps.is_beginning:
            request.order = self.root.here.order
        return request

    def needs_hooks(self) -> bool:
        """Return whether the hooks of the watch have to be on now."""
        return self.steps.is_due or self.steps.keeps_hooks()

    def due(self) -> bool:
        """Return whether the step under way is due, and counting is not paused."""
        return self.steps.is_due and not self.paused

    def told(self) -> bool:
        """Return whether something counts that the user or the optimizer tells of, whatever the model's mode."""
        return self.due() and phase() in self.during.phases

    def wanted(self) -> bool:
        """Return whether ``during=`` asks for the forward that is under way in this thread."""
        root = self.root
        return self.during.count_forward(*root.mode(), (id(root), root.here.step))

    def forward(self) -> bool:
        """Return whether the output of a module counts; note it if the model's own forward is not what calls it."""
        steps, root = self.steps, self.root
        if root.here.step == -1:
            root.find_stand_in()
        if root.stand_in is not None:
            self._is_in_parts = True
            if isinstance(steps, ByForward) and not steps.has_begun:
                steps.follow(root.stand_in)
        return self.due() and self.wanted()

    def backward(self) -> bool:
        """Return whether gradients count that come by now."""
        return self.due() and self.during.counts_backward(self._model.training)

    def goes_by_parts(self) -> bool:
        """Return whether steps are counted by something else than forwards of the model, since it has none."""
        return isinstance(self.steps, ByForward) and self.steps.what != ByForward.what

    def why_silent(self, place: Watched) -> str:
        """Return why `place` has nothing to tell, as far as is known."""
        steps = self.steps
        if self.during.left_out and not self.during.counted:
            return self.during.in_words()
        if self._is_in_parts and not place.name:
            return "the model's own forward is not called, only parts of it"
        if place.kind == "param_grad" and isinstance(steps, ByForward) and not (steps.has_begun or steps.count):
            return "no forward of the model began, so no step did: give optimizer=, or call watch.step()"
        return "nothing came by"

    def in_words(self) -> list[str]:
        """Return what whoever reads the numbers should know: what was left out, and a step that is an odd one."""
        told = [self.during.in_words()]
        if self.goes_by_parts():
            told.append(f"a step is {self.steps.what}; optimizer= makes it the optimizer's")
        return [text for text in told if text]

    def warn_if_nothing_did(self) -> None:
        """Warn if every forward was left out because of ``during=``."""
        if self.during.left_out and not self.during.counted:
            text = f"This watch of {type_name(self._model)} has counted nothing; {self.during.in_words()}."
            warnings.warn(text, HooklineWarning, stacklevel=caller_stacklevel())
