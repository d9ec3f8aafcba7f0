"""One hook for the gradients of several tensors.

Takes tensors from ``tensors``, hands a share of the hook to the torch_hook of each, and runs it once per backward pass.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import get_gradient_edge

from hookline.sites import _torch
from hookline.sites.hook_at_site import HookContainer
from hookline.sites.tensors.graph_hooks import GraphHook, GraphMember, HookInGraph, TensorHook

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.sites.hook_at_site import Attachment, HookAtSite

__all__ = ["Gather"]


class Gather(HookContainer):
    """One hook that waits for the gradients of several tensors.

    Not torch's ``register_multi_grad_hook``: that one holds the nodes of the tensors and so, unless it is removed,
    keeps leaves and chains of computed tensors alive for good; and it is shown gradients before later edits.
    With ``waits`` the hook gets all gradients of a pass when the last is there, else the first alone.
    """

    __slots__ = ("__weakref__", "_attachment", "_entry", "_lock", "_passes", "_tensors", "_torch_hooks")

    def __init__(self, attachment: Attachment, name: str, tensors: list[Tensor], *, waits: bool) -> None:
        self._attachment = attachment
        self._entry = HookInGraph(attachment, name, self)
        self._tensors = [_Awaited(tensor) for tensor in tensors] if waits else None
        self._passes: weakref.WeakValueDictionary[int, _GatheredPass] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._torch_hooks: list[weakref.ref[TensorHook]] = []
        for index, tensor in enumerate(tensors):
            torch_hook = TensorHook.of(tensor)
            self._torch_hooks.append(weakref.ref(torch_hook))
            torch_hook.add(_GatherMember(attachment, self._entry, self, index))

    def take(self, index: int, grad: Tensor | None) -> None:
        """The gradient of one of them is there."""
        task = _torch.graph_task_id()
        with self._lock:  # each device runs its part of a pass in a thread of its own
            current = self._passes.get(task)
            begins = current is None
            if current is None:
                current = self._passes[task] = _GatheredPass(self, self._to_wait_for(index))
            complete = current.take(index, grad)
        if begins:
            _torch.queue_end_of_backward(current)  # the engine keeps it until the pass is over, however it ends
        if complete:
            self.fire(current.grads)

    def _to_wait_for(self, first: int) -> set[int]:
        if self._tensors is None:
            return {first}
        return {index for index, tensor in enumerate(self._tensors) if index == first or tensor.may_come()}

    def fire(self, grads: dict[int, Tensor | None]) -> None:
        """Run the hook on what came."""
        if self._tensors is None:
            self._entry.run(*grads.values())
        else:
            self._entry.run(tuple(grads.get(index) for index in range(len(self._tensors))))

    def end(self, grads: dict[int, Tensor | None]) -> None:
        """A pass is over that did not bring all that might have come."""
        if not self._attachment.removed:
            self.fire(grads)

    def discard(self, entry: HookAtSite) -> None:
        """Take it off all of the tensors."""
        for torch_hook in filter(None, (reference() for reference in self._torch_hooks)):
            torch_hook.discard(entry)


class _Awaited:
    """One of the tensors, as far as it can be told without keeping it or its graph alive."""

    __slots__ = ("_number", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._number = _torch.sequence_number_of(get_gradient_edge(tensor).node)

    def may_come(self) -> bool:
        """Whether its gradient may come in the pass that runs; True if there is no telling."""
        tensor = self._tensor()
        if tensor is None:  # but its node may be there
            return True
        try:
            node = get_gradient_edge(tensor).node
            # Changed in place, the tensor has another node; the hook is on the old one.
            return _torch.sequence_number_of(node) != self._number or _torch.will_execute(node)
        except RuntimeError:  # what autograd.grad() does with leaves, torch does not say
            return True


class _GatheredPass:
    """The gradients of one backward pass; what the engine calls when the pass is over."""

    __slots__ = ("__weakref__", "_gather", "_missing", "grads")

    def __init__(self, gather: Gather, missing: set[int]) -> None:
        self._gather = gather
        self._missing = missing
        self.grads: dict[int, Tensor | None] = {}

    def take(self, index: int, grad: Tensor | None) -> bool:
        """Note a gradient; whether it is the last that was missing."""
        if not self._missing:
            return False
        self.grads[index] = grad
        self._missing.discard(index)
        return not self._missing

    def __call__(self) -> None:
        if self._missing:
            self._gather.end(self.grads)


class _GatherMember(GraphMember):
    """The turn of such a hook at one of its tensors."""

    __slots__ = ("_gather", "_index")

    def __init__(self, attachment: Attachment, entry: HookInGraph, gather: Gather, index: int) -> None:
        super().__init__(attachment, entry)
        self._gather = gather
        self._index = index

    def show(self, value: Any, more: tuple[Any, ...], torch_hook: GraphHook) -> Any:
        """Hand the gradient over; it goes on as it is."""
        self._gather.take(self._index, value)
        return value
