"""Fire ``backward_pre`` before torch's own backward hooks of the same module see the gradients.

Called by the last forward torch_hook of a module (`torch_hooks.LastForwardHook`) for calls that torch itself puts
backward hooks around, ours of the kind ``full_backward`` or anybody's; calls the `GradientCall` of that call in the
backward pass.

torch wraps the outputs of such a call in a node of its own *after* all forward hooks, so its hooks would come before
everything that we put on the outputs. It also keeps a list of pre-hooks for that one call: ours go in there, edits
before the hooks of others, observers after them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline.sites import tree
from hookline.sites.gradients.gradient_names import as_arguments, tensors
from hookline.sites.hook_at_site import OrderGroup

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.gradients.call_gradients import GradientCall
    from hookline.sites.gradients.call_inputs import CallState
    from hookline.sites.hook_at_site import HookAtSite

__all__ = ["run_before_torch"]


def run_before_torch(call: GradientCall, hooks: Any, output: Any, state: CallState) -> None:
    """Have torch's ``hooks`` (its ``BackwardHook`` of one call) run the ``backward_pre`` hooks of ``call`` too.

    ``output`` is what the module has made. torch sees the tensors that are the output or stand in its tuple; if there
    are others, deeper inside, the hooks wait for these and stay where they are, on the outputs.
    """
    items = output if isinstance(output, tuple) else (output,)
    if all(isinstance(item, Tensor) or not _needs_gradient(item) for item in items):
        before_torch = _HooksBeforeTorch(call, _places(items, state), len(tensors(*as_arguments(output))))
        hooks.user_pre_hooks = [before_torch.edit, *hooks.user_pre_hooks, before_torch.observe]


class _HooksBeforeTorch:
    """The ``backward_pre`` hooks of one call, as two pre-hooks of torch's."""

    __slots__ = ("_call", "_observers", "_places", "_width")

    def __init__(self, call: GradientCall, places: tuple[int, ...], width: int) -> None:
        self._call = call
        self._places = places
        self._width = width
        self._observers: tuple[HookAtSite, ...] = ()

    def edit(self, module: Any, grads: Grads) -> Grads | None:
        """Begin the pass, run raw observers and edits; return the gradients if one was replaced."""
        self._observers = ()
        if len(grads) != len(self._places):
            return None  # a forward hook behind ours has put another output there
        entries = self._call.begin_before_torch()
        self._observers = tuple(entry for entry in entries if entry.attachment.order_group is OrderGroup.OBSERVE)
        given = self._ours(grads)
        edited = self._call.fire(entries[: len(entries) - len(self._observers)], given, ())
        if edited is given:
            return None
        return tuple(edited[place] if place >= 0 else grad for place, grad in zip(self._places, grads, strict=True))

    def observe(self, module: Any, grads: Grads) -> None:
        """Run the observers that were on when the pass began; everybody has edited by now."""
        observers, self._observers = self._observers, ()
        if observers:
            self._call.fire(observers, self._ours(grads), ())

    def _ours(self, grads: Grads) -> Grads:
        """Return torch's gradients in our places, without those of inputs that were handed back."""
        ours: list[Tensor | None] = [None] * self._width
        for place, grad in zip(self._places, grads, strict=True):
            if place >= 0:
                ours[place] = grad
        return tuple(ours)


def _needs_gradient(item: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in tree.leaves(item))


def _places(items: tuple[Any, ...], state: CallState) -> tuple[int, ...]:
    """For each item of the output its place in ``grad_output``; -1 for what is not of the module's making."""
    wanted = [isinstance(item, Tensor) and item.requires_grad for item in items]
    made = [want and state.place_of(item) < 0 for item, want in zip(items, wanted, strict=True)]
    shown = made if any(made) else wanted
    ends = itertools.accumulate(len(tensors((item,), {})) for item in items)
    return tuple(end - 1 if show else -1 for end, show in zip(ends, shown, strict=True))
