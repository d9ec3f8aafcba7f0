"""Count the steps of a model whose own forward is never called, by the calls of the part of it that is called first.

Called by `ForwardCounter` when a hook fires and no forward of its model has begun. Lightning calls ``training_step``,
others call ``encode`` or a method of their own; the modules inside are called, the model is not."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from hookline.sites import _torch
from hookline.sites.attach import attach
from hookline.sites.modules.forward_counter import ForwardCounter, StandIn
from hookline.sites.wrappers import unwrap, walk

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_stand_in"]


def find_stand_in(counter: ForwardCounter) -> None:
    """Have the outermost part of the model that runs now begin the steps of `counter`, this call being the first.

    Nothing happens where the model itself is running, or no part of it is: a hook that came on in the middle of a
    forward has its first step with the next one.
    """
    model = counter.model()
    if model is None:
        return
    names = {id(module): name for name, module, *_ in walk(model)}
    running = [module for module in _torch.all_running() if id(module) in names]
    if not running or any(module is model for module in running):
        return
    module = running[-1]
    part = unwrap(module)

    def begin(called: nn.Module, args: Any) -> None:
        whole = counter.model()
        if whole is not None and not _torch.times_running(whole):
            _begin(counter)

    handle = attach(
        unwrap(module), begin, on="forward_pre", observe=True, sees="raw", prepend=True, name="step counter"
    )
    counter.stand_in = StandIn(names[id(module)], weakref.ref(part), lambda: handle.remove(quiet=True))
    _begin(counter)


def _begin(counter: ForwardCounter) -> None:
    # Gradients may be off around a frozen part, which tells nothing of the model: there its mode decides.
    counter.begin(counter.training_now() or torch.is_grad_enabled(), by_part=True)
