"""Watch the gradient of the one output of a call, for observers that ask for that and nothing else.

The last forward hook of a module calls `tap_output`; in the backward pass the tap calls an `OutputCall`. This is what a
watch needs, at every module and step, so it is short: no object is made for a call, and no argument is looked at. What
it cannot do it leaves to `GradientCall`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from hookline.sites import _torch
from hookline.sites.gradients.gradient_hooks import OutputCall
from hookline.sites.gradients.gradient_tensors import behind
from hookline.sites.gradients.tensor_taps import Tap

if TYPE_CHECKING:
    from hookline.sites.gradients.gradient_hooks import Began, GradientHooks

thread: Final[Callable[[], int]] = get_ident
"""Return the number of this thread."""


def tap_output(hooks: GradientHooks, began: Began, module: Any, output: Any) -> bool:
    """Watch one output that the call has made; return False, and do nothing, where that takes more than a tap."""
    call, entries = hooks.output_call, hooks.backward_pre
    if call is None or call.entries is not entries:  # another thread may have changed the hooks, also just now
        if not entries:
            return True
        call = hooks.output_call = OutputCall(entries)
    if call.order > began[1] or began[0] != get_ident() or not isinstance(output, Tensor):
        return False
    node = output.grad_fn
    if node is None:
        return not output.requires_grad
    shape = None
    if output._base is not None:
        output, shape = behind(output)
        if shape is None:
            return False
        node = output.grad_fn
    if not _torch.is_own_output(node, began[2], module):
        return False
    _torch.only_hook(output, node, Tap).append((call, module, shape))
    return True
