"""Parameters and their gradients, read all together at certain moments.

Takes the parameters that a watch has chosen; looks each up by its module and name whenever it is read, since others
may have put another one there (FSDP2, ``load_state_dict(assign=True)``).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.nn.parameter import is_lazy

from hookline.observe.watch.watch_hooks import give_up
from hookline.sites.tensors.parameter_hooks import NamedParameter

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.observe.watch.stats_engine import Engine, Watched

__all__ = ["Parameters"]


class _Named:
    """One parameter, by the place it is at."""

    __slots__ = ("_key", "_module", "place")

    def __init__(self, item: NamedParameter, place: Watched) -> None:
        self._module = weakref.ref(item.module)
        self._key = item.name.rpartition(".")[2]
        self.place = place

    def now(self) -> Tensor | None:
        module = self._module()
        if module is None or self._key not in module._parameters:
            return None
        found = module._parameters[self._key]  # those of a ScriptModule have no get()
        return None if found is None or is_lazy(found) else found


class Parameters:
    """The parameters of one watch."""

    def __init__(self, engine: Engine, values: list[NamedParameter], gradients: list[NamedParameter]) -> None:
        self._values = [_Named(item, engine.place(item.name, "param")) for item in values]
        self._gradients = [_Named(item, engine.place(item.name, "param_grad")) for item in gradients]

    @property
    def wants_gradients(self) -> bool:
        """Whether gradients are to be read."""
        return bool(self._gradients)

    def read_values(self, engine: Engine) -> None:
        """Take the parameters as they are now; what was taken before is forgotten."""
        found: list[_Item] = []
        with engine.lock:
            for named in self._values:
                value = named.now()
                if value is not None:
                    engine.empty(named.place)
                    found.append((named.place, value, None))
            _take_all(engine, found)

    def read_gradients(self, engine: Engine, scale: Any, of: Optimizer | None = None) -> None:
        """Add the gradients as they are now; of one optimizer's parameters alone, if given."""
        own = None if of is None else {id(each) for group in of.param_groups for each in group["params"]}
        found: list[_Item] = []
        for named in self._gradients:
            value = named.now()
            if value is not None and value.grad is not None and (own is None or id(value) in own):
                found.append((named.place, value.grad, scale))
        _take_all(engine, found)

    def forget_gradients(self, engine: Engine) -> None:
        """As if none had been read."""
        for named in self._gradients:
            engine.empty(named.place)


_Item: TypeAlias = "tuple[Watched, Tensor, Any]"


def _take_all(engine: Engine, items: list[_Item]) -> None:
    """Those on a GPU in one go, others one by one; one that cannot be read costs neither the run nor the rest."""
    together = [item for item in items if item[1].device.type not in ("cpu", "meta")]
    apart = [[item] for item in items if item[1].device.type in ("cpu", "meta")]
    for some in [together, *apart] if together else apart:
        try:
            engine.take_all(some)
            for place, tensor, scale in some:
                engine.take_beside(place, tensor, scale)
        except Exception as error:
            give_up(some[0][0], some[0][1], error)
