"""Run the hooks on tensors and graph nodes when torch calls with a gradient, for one tensor or several together.

``tensor_hooks`` registers these with torch. A `GraphHook` belongs to the tensor or the graph and goes with it. Entries
and handles refer to it weakly, and it refers to nothing of the graph, so that tensors are freed exactly when torch
alone would free them, without waiting for the garbage collector.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import unserializable_hook

from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.hook_at_site import Attachment, ForwardCounter, HookAtSite, HookContainer, OrderGroup
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from hookline.sites.hook_at_site import Attachment, HookAtSite

NO_MODEL: Final = ForwardCounter()
"""The counter of what belongs to no model; no forward of it ever begins."""


class HookInGraph(HookAtSite):
    """One hook on one tensor, node or scope; kept by its holder and its attachment, and keeping neither."""

    __slots__ = ("_attachment", "_container")

    _attachment: weakref.ref[Attachment]
    _container: weakref.ref[HookContainer]

    def __init__(self, attachment: Attachment, name: str, container: HookContainer) -> None:
        super().__init__(attachment, name, container, NO_MODEL)
        attachment.entries[self] = None

    @property
    def attachment(self) -> Attachment:
        """The attachment; whoever asks comes from there, so it is alive."""
        return cast(Attachment, self._attachment())

    @attachment.setter
    def attachment(self, attachment: Attachment) -> None:
        self._attachment = weakref.ref(attachment)

    @property
    def container(self) -> HookContainer:
        """The container, or a stand-in once that is gone."""
        return self._container() or _GONE

    @container.setter
    def container(self, container: HookContainer) -> None:
        self._container = weakref.ref(container)

    def run(self, value: Any, *more: Any) -> Any:
        """Call the hook, with whatever options it has."""
        self.count()
        if self.simple:
            return self.hook(value, *more)
        return self.call(value, more, self.site_of(self.fired - 1) if self.attachment.wants_site else None)

    def site_of(self, call: int) -> Site:
        """Return the `Site` of a firing; there is no module."""
        none: Any = None
        return Site(self.name, none, self.attachment.kind, call)


class _Gone(HookContainer):
    """Stands for a hook whose graph is gone."""

    def discard(self, entry: HookAtSite) -> None:
        """Do nothing: there is nothing to take off."""

    def alive(self) -> bool:
        return False


_GONE: Final = _Gone()


class GraphMember:
    """One hook on one tensor or node."""

    __slots__ = ("attachment", "entry")

    def __init__(self, attachment: Attachment, entry: HookInGraph) -> None:
        self.attachment = attachment
        self.entry = entry

    def show(self, value: Any, more: tuple[Any, ...], torch_hook: GraphHook) -> Any:
        """Run the hook on a gradient; return the gradient as it goes on from there."""
        result = self.entry.run(value, *more)
        if result is None or result is value or self.attachment.order_group is not OrderGroup.EDIT:
            return value
        return torch_hook.fit(result, value, self.entry)


@unserializable_hook
class GraphHook(HookContainer):
    """Runs the hooks of ours on one tensor or node."""

    __slots__ = ("__weakref__", "_handle", "members")

    _handle: RemovableHandle

    def __init__(self) -> None:
        self.members: tuple[GraphMember, ...] = ()

    def __call__(self, value: Any, *more: Any) -> Any:
        given = value
        for member in self.members:
            value = member.show(value, more, self)
        return None if value is given else value

    def fit(self, new: Any, old: Any, entry: HookAtSite) -> Any:
        """Return what a hook returned, if it can stand in for what it was shown."""
        raise NotImplementedError

    @classmethod
    def found_or_made(cls, register: Callable[[Self], RemovableHandle]) -> Self:
        """Return the hook that is there already, or a new one; ``register`` makes torch call it. Under LOCK."""
        torch_hook = cls()
        handle = register(torch_hook)
        # torch tells what else is registered only by way of the handle it gives.
        for other in _torch.hooks_beside(handle):
            if type(other) is cls and other is not torch_hook:
                handle.remove()
                return other
        torch_hook._handle = handle
        return torch_hook

    def add(self, member: GraphMember) -> None:
        """Put a hook in its place; under LOCK."""
        self.members = tuple(sorted((*self.members, member), key=lambda member: member.attachment.rank))

    def discard(self, entry: HookAtSite) -> None:
        """Take a hook off; the last one takes this off too."""
        self.members = tuple(member for member in self.members if member.entry is not entry)
        if not self.members:
            self._handle.remove()


class TensorHook(GraphHook):
    """Called by torch when the gradient of a tensor is there."""

    __slots__ = ()

    @classmethod
    def of(cls, tensor: Tensor) -> TensorHook:
        """Return the hook on that tensor; under LOCK."""
        return cls.found_or_made(tensor.register_hook)

    def fit(self, new: Any, old: Any, entry: HookAtSite) -> Tensor:
        """Return the new gradient, if it can stand in for the old one."""
        return _fitting(new, old, entry, "the return value")


class NodeHook(GraphHook):
    """Called by torch before, or after, a node runs."""

    __slots__ = ()

    def fit(self, new: Any, old: Any, entry: HookAtSite) -> tuple[Tensor | None, ...]:
        """Return the new gradients, if they can stand in for the old ones; None takes one away."""
        if isinstance(new, Tensor) and len(old) == 1:
            new = (new,)
        if not isinstance(new, tuple | list) or len(new) != len(old):
            got = f"{len(new)} values" if isinstance(new, tuple | list) else type_name(new)
            raise _misfit(entry, f"expected None or a tuple of {len(old)}, got {got}")
        return tuple(
            None if one is None else _fitting(one, was, entry, f"entry {index}")
            for index, (one, was) in enumerate(zip(new, old, strict=True))
        )


def _fitting(new: Any, old: Tensor | None, entry: HookAtSite, what: str) -> Tensor:
    if not isinstance(new, Tensor):
        raise _misfit(entry, f"{what} is {type_name(new)}, not a tensor or None")
    if old is None:
        raise _misfit(entry, f"{what} is for a gradient that did not come in this pass (None), so it cannot be given")
    if _looks(new) != _looks(old):
        raise _misfit(entry, f"{what} is {_described(new)}, the gradient is {_described(old)}")
    return new


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f", {tensor.layout}"
    return f"{tuple(tensor.shape)}, {tensor.dtype}{layout}, on {tensor.device}"


def _misfit(entry: HookAtSite, what: str) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r}: {what}.")


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
        """Take the gradient of one of them; fire if it is the last that was missing."""
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
        """Fire at the end of a pass that did not bring all that might have come."""
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
        """Return whether its gradient may come in the pass that runs; True if there is no telling."""
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
        """Note a gradient; return whether it is the last that was missing."""
        if not self._missing:
            return False
        self.grads[index] = grad
        self._missing.discard(index)
        return not self._missing

    def __call__(self) -> None:
        if self._missing:
            self._gather.end(self.grads)


class _GatherMember(GraphMember):
    """Such a hook at one of its tensors."""

    __slots__ = ("_gather", "_index")

    def __init__(self, attachment: Attachment, entry: HookInGraph, gather: Gather, index: int) -> None:
        super().__init__(attachment, entry)
        self._gather = gather
        self._index = index

    def show(self, value: Any, more: tuple[Any, ...], torch_hook: GraphHook) -> Any:
        """Hand the gradient over; it goes on as it is."""
        self._gather.take(self._index, value)
        return value
