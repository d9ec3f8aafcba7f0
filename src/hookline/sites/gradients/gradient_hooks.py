"""The gradient hooks of one module or function, where the backward pass finds them fast.

Takes the two lanes of entries from whoever keeps them (`ModuleHooks`, or a function's hooks), tells a `GradientCall`
what has to be watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookline.sites.hook_at_site import HookContainer, OrderGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookline.sites.hook_at_site import HookAtSite
    from hookline.sites.modules.forward_counter import ForwardCounter

__all__ = ["GradientHooks"]


class GradientHooks(HookContainer):
    """What a call has to know of its gradient hooks."""

    # Defaults of the class, not set one by one for each of ten thousand modules.
    backward_pre: tuple[HookAtSite, ...] = ()
    backward: tuple[HookAtSite, ...] = ()
    """The live hooks, in the order they run."""
    has_gradients = False
    edits_gradients = False
    """Whether a hook may return gradients of inputs, which then have to go in as aliases."""
    edits_outputs = False
    """The same for the gradients of outputs, which pass a gate if there are several."""
    watches_inputs = False
    uses_input_once = False
    """Whether it is known to read its one input once, and to write elsewhere."""
    tells_sites = False
    """Whether a hook wants to know its site."""
    tells_scopes = False
    """Whether a hook is for the calls of one context alone."""
    plan = ""
    """The same in letters, for calls that are compiled (`compiled.wiring`)."""
    clock: Callable[[], Any] | None = None
    """Asked whenever a gradient has gone to an input, if a hook wants to know when that was."""
    calls_seen = 0
    """How often there was a call while there were gradient hooks."""

    def set_gradient_hooks(self, pre: tuple[HookAtSite, ...], post: tuple[HookAtSite, ...]) -> None:
        """These are the hooks from now on, for the calls that are under way too."""
        self.backward_pre, self.backward = pre, post
        self.has_gradients = bool(pre or post)
        self.edits_outputs = any(map(_may_edit, pre))
        self.edits_gradients = any(map(_may_edit, post))
        self.watches_inputs = bool(post)
        self.tells_sites = any(entry.attachment.wants_site for entry in (*pre, *post))
        self.tells_scopes = any(entry.attachment.context is not None for entry in (*pre, *post))
        self.clock = next((entry.attachment.clock for entry in post if entry.attachment.clock is not None), None)

    def gradient_moments(self) -> dict[ForwardCounter, tuple[int, int]]:
        """Step and call number of the call that begins now, for hooks that want to know."""
        counters = {entry.counter for entry in (*self.backward_pre, *self.backward) if entry.attachment.wants_site}
        return {counter: counter.moment(self) for counter in counters}


def _may_edit(entry: HookAtSite) -> bool:
    return entry.attachment.may_edit and entry.attachment.order_group is OrderGroup.EDIT
