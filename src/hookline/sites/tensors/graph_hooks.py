"""What torch calls when a gradient comes to a tensor or a graph node that carries hooks of ours.

Takes members from ``tensors``, ``gather`` and ``nodes``, runs them in order, hands edits back to autograd. A torch_hook
belongs to the tensor or the graph and goes with it; entries and handles refer to it weakly, and it to nothing of the
graph, so that tensors are freed exactly when torch alone would free them, without waiting for the collector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from hookline.errors import HookReturnError
from hookline.messages import type_name
from hookline.sites import _torch
from hookline.sites.hook_at_site import Attachment, ForwardCounter, HookAtSite, HookContainer, OrderGroup
from hookline.sites.site_info import Site

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["NO_MODEL", "GraphHook", "GraphMember", "HookInGraph", "NodeHook", "TensorHook"]

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
        """What it belongs to; whoever asks comes from there, so it is alive."""
        return cast(Attachment, self._attachment())

    @attachment.setter
    def attachment(self, attachment: Attachment) -> None:
        self._attachment = weakref.ref(attachment)

    @property
    def container(self) -> HookContainer:
        """What it sits in, or a stand-in once that is gone."""
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
        """What a hook that asks is told; there is no module."""
        none: Any = None
        return Site(self.name, none, self.attachment.kind, call)


class _Gone(HookContainer):
    """Stands in for a torch_hook whose graph is gone."""

    def discard(self, entry: HookAtSite) -> None:
        """There is nothing to take off."""

    def alive(self) -> bool:
        return False


_GONE: Final = _Gone()


class GraphMember:
    """One hook's turn at a torch_hook."""

    __slots__ = ("attachment", "entry")

    def __init__(self, attachment: Attachment, entry: HookInGraph) -> None:
        self.attachment = attachment
        self.entry = entry

    def show(self, value: Any, more: tuple[Any, ...], torch_hook: GraphHook) -> Any:
        """Run the hook on a gradient; the gradient as it goes on from there."""
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
        """What a hook returned, if it can stand in for what it was shown."""
        raise NotImplementedError

    @classmethod
    def found_or_made(cls, register: Callable[[Self], RemovableHandle]) -> Self:
        """The torch_hook that is there already, or a new one; ``register`` makes torch call it. Under LOCK."""
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
        """Take a hook off; the last one takes the torch_hook along."""
        self.members = tuple(member for member in self.members if member.entry is not entry)
        if not self.members:
            self._handle.remove()


class TensorHook(GraphHook):
    """What torch calls when the gradient of a tensor is there."""

    __slots__ = ()

    @classmethod
    def of(cls, tensor: Tensor) -> TensorHook:
        """The torch_hook on that tensor; under LOCK."""
        return cls.found_or_made(tensor.register_hook)

    def fit(self, new: Any, old: Any, entry: HookAtSite) -> Tensor:
        """The new gradient, if it can stand in for the old one."""
        return _fitting(new, old, entry, "the return value")


class NodeHook(GraphHook):
    """What torch calls before, or after, a node runs."""

    __slots__ = ()

    def fit(self, new: Any, old: Any, entry: HookAtSite) -> tuple[Tensor | None, ...]:
        """The new gradients, if they can stand in for the old ones; None takes one away."""
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
