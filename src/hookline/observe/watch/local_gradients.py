"""Take the gradients of parameters as each backward pass of this rank makes them, before ranks reduce them.

`WatchSites` puts it on for ``watch(on="param_grad_local")``. The hooks sit on the parameters themselves, ahead of DDP's
buckets and of FSDP2's reduce-scatter. So no communication hook is needed, of which DDP allows one only, and the
reduction is the one that runs without a watch. FSDP2 keeps whole parameters during a forward and its backward alone;
there each module's own are hooked when its forward begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from hookline.distributed.shards import placed
from hookline.sites.tensors import attach_tensor

if TYPE_CHECKING:
    from hookline.observe.watch.hooks import ParameterSlot
    from hookline.observe.watch.place import WatchedPlace
    from hookline.sites.handle import HookHandle
    from hookline.sites.targets import Named

__all__ = ["LOCAL_GRADIENT", "LocalGradients"]

LOCAL_GRADIENT: Final = "param_grad_local"


class LocalGradients:
    """Hooks on the parameters of one watch.

    Args:
        take: Called with the place and the gradient, in the backward pass.
    """

    def __init__(self, take: Callable[[WatchedPlace, Tensor], None]) -> None:
        self.slots: list[ParameterSlot] = []
        """Where the parameters are."""
        self._by_module: dict[nn.Module, list[ParameterSlot]] = {}
        self._take = take
        self._hooked: dict[ParameterSlot, tuple[Callable[[], Tensor | None], HookHandle]] = {}

    def put_on(self) -> list[Named]:
        """Hook all parameters; return the modules whose parameters FSDP2 replaces for a forward, with their names."""
        self._by_module.clear()
        for slot in self.slots:
            self._by_module.setdefault(slot.module, []).append(slot)
        for module in self._by_module:
            self.hook_parameters(module)
        return [
            (slots[0].place.name.rpartition(".")[0], module)
            for module, slots in self._by_module.items()
            if any(map(_is_distributed, module._parameters.values()))
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for _, handle in self._hooked.values():
            handle.remove(quiet=True)
        self._hooked.clear()

    def hook_parameters(self, module: nn.Module) -> None:
        """Hook the parameters that a module has now."""
        for slot in self._by_module.get(module, ()):
            parameter = slot.current()
            if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
                continue
            before = self._hooked.get(slot)
            if before is not None and before[0]() is parameter:
                continue
            if before is not None and not _is_distributed(parameter):
                before[1].remove(quiet=True)  # that on the shard, which never fires
            handle = attach_tensor(parameter, self._hook_for(slot.place), observe=True, name=slot.place.label)
            self._hooked[slot] = weakref.ref(parameter), handle

    def _hook_for(self, place: WatchedPlace) -> Callable[[Tensor | None], None]:
        def take_gradient(grad: Tensor | None) -> None:
            if grad is not None:
                self._take(place, grad)

        return take_gradient


def _is_distributed(parameter: Any) -> bool:
    """Return whether a parameter is a shard, which FSDP2 replaces by the whole one for a forward."""
    return parameter is not None and placed(parameter) is not None
