"""Parameters and their gradients, read all together at certain moments.

Takes the parameters that a watch has chosen; looks each up by its module and name whenever it is read, since others
may have put another one there (FSDP2, ``load_state_dict(assign=True)``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.sites import _torch
from hookline.sites.attach import check_request
from hookline.sites.handle import HandleSet
from hookline.sites.kinds import Kind
from hookline.sites.parameters import NamedParameter, fasten_parameters

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hookline.observe.stats.engine import Engine, Watched

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
        found = None if module is None else module._parameters.get(self._key)
        return None if found is None or is_lazy(found) else found


class Parameters:
    """The parameters of one watch."""

    def __init__(self, engine: Engine, values: list[NamedParameter], gradients: list[NamedParameter]) -> None:
        self._values = [_Named(item, engine.place(item.name, "param")) for item in values]
        self._gradients = [_Named(item, engine.place(item.name, "param_grad")) for item in gradients]
        self._chosen = gradients
        self._task = -1
        self._handles = HandleSet()

    @property
    def wants_gradients(self) -> bool:
        """Whether gradients are to be read."""
        return bool(self._gradients)

    def read_values(self, engine: Engine) -> None:
        """Take the parameters as they are now; what was taken before is forgotten."""
        for named in self._values:
            value = named.now()
            if value is not None:
                engine.empty(named.place)
                engine.take(named.place, value)

    def read_gradients(self, engine: Engine, scale: Any, of: Optimizer | None = None) -> None:
        """Add the gradients as they are now; of one optimizer's parameters alone, if given."""
        own = None if of is None else {id(each) for group in of.param_groups for each in group["params"]}
        for named in self._gradients:
            value = named.now()
            if value is not None and value.grad is not None and (own is None or id(value) in own):
                engine.take(named.place, value.grad, scale)

    def read_after_backward(self, model: nn.Module, read: Callable[[], None]) -> None:
        """From now on, have the gradients read at the end of each backward pass that comes to one of them."""
        trained = [item for item in self._chosen if item.parameter.requires_grad]

        def came(parameter: Tensor) -> None:
            task = _torch.graph_task_id()
            if task != self._task:
                self._task = task
                _torch.queue_end_of_backward(read)

        if trained:
            request = check_request(came, Kind.PARAM_GRAD, name="watch")
            self._handles.add(fasten_parameters(request, model, trained))

    def remove(self) -> None:
        """No longer read at the end of backward passes."""
        self._handles.remove(quiet=True)
        self._handles = HandleSet()
