"""Keep the gradient hooks of one module or function where the backward pass finds them fast.

`ModuleHooks` and `FunctionHooks` derive from `GradientHooks` and fill it; a `GradientCall` reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch import nn

from hookline.sites.hook_at_site import HookContainer, OrderGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hookline.sites.hook_at_site import ForwardCounter, HookAtSite

_EDIT: Final = OrderGroup.EDIT  # looking an enum member up by its class costs 0.2 µs
USE_INPUT_ONCE: Final = frozenset(
    {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm}
    | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Softmax}
)
"""Classes that read their one input once, and write elsewhere."""


Began: TypeAlias = tuple[int, int, int]
"""How a call began: its thread, when, as `next_order` counts, and the number of the next graph node there."""


class OutputCall:
    """The observers of what comes to a module's output, for all its calls while they stay the same."""

    __slots__ = ("entries", "order")

    def __init__(self, entries: tuple[HookAtSite, ...]) -> None:
        self.entries = entries
        """The observers; it is for these alone, and another is made when they change."""
        self.order = max(entry.attachment.order for entry in entries)
        """When the last of them came; it takes part in calls that began later."""

    def take_output(self, module: Any, grad: Tensor | None) -> Tensor | None:
        """Fire with the gradient of the output of ``module``; return it."""
        for entry in self.entries:
            if not entry.attachment.removed:
                entry.fired += 1
                entry.last_step = entry.counter.step
                entry.hook(module, (grad,))
        return grad


class GradientHooks(HookContainer):
    """The gradient hooks of one module or function, and what a call has to know of them."""

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
    observes_outputs = False
    """Whether all hooks observe the gradients of outputs, and can be called straight."""
    output_call: OutputCall | None = None
    """What fires them then; made by the first call."""
    uses_input_once = False
    """Whether the module is one of `USE_INPUT_ONCE`."""
    tells_sites = False
    """Whether a hook declares ``site``."""
    tells_contexts = False
    """Whether a hook is for the calls of one context alone."""
    plan = ""
    """The same in letters, for calls that are compiled (`plan_of`)."""
    clock: Callable[[], Any] | None = None
    """Called whenever a gradient has gone to an input, if a hook asks when that was."""
    entered = -1
    """When the latest call that gradient hooks take part in began."""
    began: Began | None = None
    """The same of a call whose gradient hooks observe its output alone, until it is over."""
    begins_late = False
    """Whether no pre-hook notes when a call begins: its one forward hook does all (`RegisteredHooks`)."""
    calls_seen = 0
    """How often there was a call while there were gradient hooks."""

    def set_gradient_hooks(self, pre: tuple[HookAtSite, ...], post: tuple[HookAtSite, ...]) -> None:
        """Replace the hooks, for the calls that are under way too."""
        self.backward_pre, self.backward = pre, post
        self.has_gradients = bool(pre or post)
        self.edits_outputs = any(map(_may_edit, pre))
        self.edits_gradients = any(map(_may_edit, post))
        self.watches_inputs = bool(post)
        self.observes_outputs = bool(pre) and not post and all(entry.simple and not _edits(entry) for entry in pre)
        self.output_call = None
        self.tells_sites = any(entry.attachment.wants_site for entry in (*pre, *post))
        self.tells_contexts = any(entry.attachment.context is not None for entry in (*pre, *post))
        self.clock = next((entry.attachment.clock for entry in post if entry.attachment.clock is not None), None)

    def gradient_moments(self) -> dict[ForwardCounter, tuple[int, int]]:
        """Return step and call number of the call that begins now, for each model whose hooks declare ``site``."""
        entries = (*self.backward_pre, *self.backward)
        return {counter: counter.moment(self) for counter in {e.counter for e in entries if e.attachment.wants_site}}


def _edits(entry: HookAtSite) -> bool:
    return entry.attachment.order_group is _EDIT


def _may_edit(entry: HookAtSite) -> bool:
    return entry.attachment.may_edit and _edits(entry)
