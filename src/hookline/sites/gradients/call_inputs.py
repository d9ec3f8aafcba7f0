"""The inputs of one call as they went in: what travels with it from before the forward to after it.

Made and read by ``gradients``; torch hands the `CallState` from our pre-hook to our post-hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hookline.sites import _torch

if TYPE_CHECKING:
    from hookline.sites import tree
    from hookline.sites.gradients.call_gradients import GradientCall

__all__ = ["CallState", "CallStateArgs", "Taken", "Window"]


class CallState(dict[str, Any]):
    """The keyword arguments of one call, with its `GradientCall` in tow from pre-hook to post-hook.

    torch hands the same object to both, so no stack has to be kept, and none is left behind by a forward
    that raises. The graph nodes of the inputs travel here too and not in the call: the call hangs on hooks of
    those very nodes, and the collector cannot see such a ring.
    """

    call: GradientCall
    edges: _torch.Edges
    """Where the graph leads to an input as it went in, and its place in ``grad_input``."""
    aliases = False
    """Whether aliases of the inputs went in."""
    watches = False
    """Whether the gradients of the inputs were to be watched when the call began."""
    taken: tuple[Taken, ...] = ()
    """Inputs that could be changed in place unnoticed, or be leaves, as they went in."""
    swapped: tuple[tree.Swapped, ...] = ()
    """Where an alias stands in a list or dict of the caller's."""

    given: frozenset[int] = frozenset()
    """The ids of all inputs, where there are several."""

    def changed(self) -> list[Taken]:
        """The inputs that were changed in place.

        A view shows a change of what it is a view of: of one beside the input that it shows, and of the second of two
        views of one tensor, it is taken that the other was meant (``x[0] = y``).
        """
        found: dict[int, Taken] = {}
        for taken in self.taken:
            base = taken.tensor._base
            if taken.tensor._version != taken.version and id(base) not in self.given:
                found.setdefault(id(taken) if base is None else id(base), taken)
        return list(found.values())

    def was_taken(self, tensor: Tensor) -> bool:
        """Whether the very tensor is one of the noted inputs."""
        return any(taken.tensor is tensor for taken in self.taken)

    def place_of(self, tensor: Tensor) -> int:
        """Which input the tensor is, handed back as it went in; -1 for none."""
        if tensor.grad_fn is None:
            return next((taken.index for taken in self.taken if taken.tensor is tensor), -1)
        outputs = self.edges.get(tensor.grad_fn)
        return -1 if outputs is None else outputs.get(tensor.output_nr, -1)


class CallStateArgs(tuple[Any, ...]):
    """Positional arguments with a `CallState`, for a call whose keyword arguments cannot be exchanged.

    Where torch puts its own backward hooks around the call, it makes another tuple of the same type, item by item, as
    named tuples are made; the state goes over to that one.
    """

    state: CallState | None = None

    def __new__(cls, *items: Any) -> Self:
        new = super().__new__(cls, items)
        before = _torch.variable_of_caller("args", 1)
        if isinstance(before, CallStateArgs):
            new.state = before.state
        return new


class Taken:
    """An input as it went in, to tell whether the module has changed it in place."""

    __slots__ = ("index", "node", "output", "shape", "tensor", "version", "window")

    def __init__(
        self, index: int, tensor: Tensor, source: Tensor, shape: torch.Size | None, *, aliased: bool = False
    ) -> None:
        self.index = index
        self.tensor = tensor
        self.shape = shape
        """Its own, if the gradient may come in that of the tensor behind it."""
        self.version = tensor._version
        # In-place on a view replaces its node; the tensor behind it keeps the old one. Where an alias goes in, the
        # tensor itself gets a new node.
        self.node: Any = source.grad_fn if shape is not None or aliased else None
        self.output = source.output_nr
        self.window: Window | None = None
        base = tensor._base
        if shape is None and base is not None and base.grad_fn is not None:
            self.node, self.output, self.window = base.grad_fn, base.output_nr, Window(tensor, base)


class Window:
    """A view that is no reshape: which part of the tensor behind it it shows."""

    __slots__ = ("_behind", "_view")

    def __init__(self, view: Tensor, base: Tensor) -> None:
        self._behind = base.size(), base.stride()
        self._view = view.size(), view.stride(), view.storage_offset() - base.storage_offset()

    def cut(self, grad: Tensor) -> Tensor:
        """The view's part of a gradient of the tensor behind it."""
        return self._laid_out(grad).as_strided(*self._view)

    def add(self, grad: Tensor, more: Tensor) -> Tensor:
        """That gradient with something added to the view's part of it."""
        whole = self._laid_out(grad)
        whole.as_strided(*self._view).add_(more)
        return whole

    def _laid_out(self, grad: Tensor) -> Tensor:
        """A copy in memory as the tensor itself is, whose offsets then hold."""
        size, stride = self._behind
        return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
