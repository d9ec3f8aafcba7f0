"""A model without its hooks for a while: what runs meanwhile is nobody's request, and no hook is to see it.

Used by ``shapes``, which tries a model out before anybody is served. Hooks of others stay on: they may be how the model
works (layers that are spread over several devices gather their parts in such hooks).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hookline.sites import _torch
from hookline.sites.modules.call_guard import CallGuard
from hookline.sites.modules.module_hooks import LOCK
from hookline.sites.modules.torch_hooks import TorchHook

if TYPE_CHECKING:
    from torch import nn

__all__ = ["without_our_hooks"]


@contextmanager
def without_our_hooks(model: nn.Module) -> Iterator[None]:
    """For as long as the block lasts, no hook of ours is called around a forward, and no forward is counted.

    Recipe: ``with without_our_hooks(model): model(ids)``. Hooks must not come or go meanwhile.
    """
    modules = list(model.modules())
    with LOCK:
        kept = [found for module in modules for found in _take_ports(module)]
        guards = [(module, guard) for module in modules if (guard := _take_guard(module)) is not None]
    try:
        yield
    finally:
        with LOCK:
            for hooks, items in kept:
                hooks.clear()
                hooks.update(items)  # each in its place again: edits first, observers last
            for module, guard in guards:
                module.__dict__[_torch.CALL_IMPL] = guard


def _take_ports(module: nn.Module) -> Iterator[tuple[dict[int, Any], list[tuple[int, Any]]]]:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        items = list(hooks.items())
        ours = [hook_id for hook_id, hook in items if isinstance(hook, TorchHook)]
        if ours:
            for hook_id in ours:
                del hooks[hook_id]
            yield hooks, items


def _take_guard(module: nn.Module) -> CallGuard | None:
    guard = module.__dict__.get(_torch.CALL_IMPL)
    if not isinstance(guard, CallGuard):
        return None
    del module.__dict__[_torch.CALL_IMPL]
    return guard
