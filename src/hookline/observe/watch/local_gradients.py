"""Take the gradients of parameters as each backward pass of this rank makes them, before ranks reduce them.

`WatchSites` puts it on for ``watch(on="param_grad_local")``. The hooks sit on the parameters themselves, ahead of DDP's
buckets and of FSDP2's reduce-scatter. So no communication hook is needed, of which DDP allows one only, and the
reduction is the one that runs without a watch. FSDP2 keeps whole parameters during a forward and its backward alone;
there each module's own are hooked when its forward begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline.distributed.shards import placed
from hookline.sites.attach import attach_to_modules, new_attachment
from hookline.sites.handle import HandleSet
from hookline.sites.hook_at_site import AttachOptions
from hookline.sites.kinds import Kind
from hookline.sites.tensors import attach_tensor

if TYPE_CHECKING:
    from hookline.observe.watch.engine import StatsEngine
    from hookline.observe.watch.place import WatchedPlace
    from hookline.sites.handle import HookHandle
    from hookline.sites.parameters import NamedParameter

__all__ = ["LOCAL_GRADIENT", "LocalGradients"]

LOCAL_GRADIENT = "param_grad_local"


class LocalGradients:
    """Hooks the parameters of one watch, and gives each gradient to the engine.

    Args:
        model: The model.
        engine: Takes the gradients.
        parameters: The parameters to hook.
        take: Called with the place and the gradient, in the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: StatsEngine,
        parameters: list[NamedParameter],
        take: Callable[[WatchedPlace, Tensor], None],
    ) -> None:
        self._model = model
        self._take = take
        self._keys: dict[nn.Module, dict[str, WatchedPlace]] = {}
        for item in parameters:
            key = item.name.rpartition(".")[2]
            self._keys.setdefault(item.module, {})[key] = engine.place(item.name, LOCAL_GRADIENT)
        self._names = {id(item.module): item.name.rpartition(".")[0] for item in parameters}
        self._handles = HandleSet()
        self._hooked: dict[tuple[int, str], tuple[Callable[[], Tensor | None], HookHandle]] = {}

    def switch(self, on: bool) -> None:
        """Put the hooks on, or take them off."""
        if not on:
            self._handles.remove(quiet=True)
            self._handles = HandleSet()
            for _, handle in self._hooked.values():
                handle.remove(quiet=True)
            self._hooked.clear()
            return
        for module in self._keys:
            self._hook_parameters(module)
        gathered = [(self._names[id(module)], module) for module in self._keys if _is_distributed(module)]
        if gathered:
            request = new_attachment(
                self._begin_forward, Kind.FORWARD_PRE, AttachOptions(observe=True, name="watch local gradients")
            )
            self._handles.add(attach_to_modules(request, self._model, gathered))

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        """Hook the parameters that are there for this forward."""
        if module in self._keys:
            self._hook_parameters(module)

    def _hook_parameters(self, module: nn.Module) -> None:
        for key, place in self._keys[module].items():
            parameter = module._parameters.get(key)
            if parameter is None or not parameter.requires_grad or not parameter.is_leaf:
                continue
            before = self._hooked.get((id(module), key))
            if before is not None and before[0]() is parameter:
                continue
            if before is not None and placed(parameter) is None:
                before[1].remove(quiet=True)  # that on the shard, which never fires
            handle = attach_tensor(parameter, self._hook_for(place), observe=True, name=place.label)
            self._hooked[id(module), key] = weakref.ref(parameter), handle

    def _hook_for(self, place: WatchedPlace) -> Callable[[Tensor | None], None]:
        def take_gradient(grad: Tensor | None) -> None:
            if grad is not None:
                self._take(place, grad)

        return take_gradient


def _is_distributed(module: nn.Module) -> bool:
    """Return whether FSDP2 may put other parameters into ``module`` for a forward."""
    return any(each is not None and placed(each) is not None for each in module._parameters.values())
