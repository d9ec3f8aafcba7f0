"""List the tensors of a call that have gradients, name their places, and find the tensor behind a view.

Called by ``call_gradients``, ``tensor_taps`` and the operators of compiled code. Calls ``tree`` to look into
containers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from hookline import tree
from hookline.errors import HookReturnError
from hookline.messages import type_name

if TYPE_CHECKING:
    from hookline.hook_types import Grads
    from hookline.sites.hook_at_site import HookAtSite

IndexedTensor: TypeAlias = tuple[int, Tensor]
"""A tensor with its index in ``grad_input`` or ``grad_output``."""

_NOTHING: Final[tuple[Any, ...]] = ()


def as_arguments(output: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return an output in the shape of arguments: the items of a tuple or list count like positional ones."""
    if isinstance(output, tuple | list):
        return output, {}
    return _NOTHING, {"": output}


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """Return the tensors whose gradients are handed over, in order.

    A positional value has one place even if it is no tensor, as in torch; of containers and keyword arguments
    only the tensors count.
    """
    found: list[Tensor | None] = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += _inside(value) or [None]
    for value in kwargs.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            found += _inside(value)
    return found


def _inside(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what `tensors` gives."""
    names: list[str] = []
    for index, value in enumerate(args):
        inside = [path for path, leaf in tree.leaves(value, str(index)) if isinstance(leaf, Tensor)]
        names += inside or [str(index)]
    for key, value in kwargs.items():
        names += [path for path, leaf in tree.leaves(value, key) if isinstance(leaf, Tensor)]
    return tuple(names)


def distinct(tensors: list[Any]) -> list[IndexedTensor]:
    """Return the tensors that gradients will come for, each once, with its place."""
    if len(tensors) == 1:
        only = tensors[0]
        return [(0, only)] if only is not None and only.requires_grad else []
    seen: dict[int, IndexedTensor] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.requires_grad:
            seen.setdefault(id(tensor), (index, tensor))
    return list(seen.values())


def checked(result: Any, grads: Grads, entry: HookAtSite) -> Grads:
    """Return a hook's return value as gradients, if it fits."""
    if isinstance(result, Tensor) and len(grads) == 1:
        result = (result,)
    if not isinstance(result, tuple | list) or len(result) != len(grads):
        got = f"{len(result)}" if isinstance(result, tuple | list) else type_name(result)
        raise _misfit(entry, f"expected a tuple of {len(grads)}, or None, got {got}")
    return tuple(_checked_one(i, new, old, entry) for i, (new, old) in enumerate(zip(result, grads, strict=True)))


def _checked_one(index: int, new: Any, old: Tensor | None, entry: HookAtSite) -> Tensor | None:
    if new is None and old is not None:
        return torch.zeros_like(old)  # cuts the gradient; a tensor hook cannot say "none"
    if new is None:
        return None
    if not isinstance(new, Tensor):
        raise _misfit(entry, f"entry {index} is {type_name(new)}, not a tensor or None")
    if old is None:
        raise _misfit(entry, f"entry {index} got no gradient in this pass, so it cannot be given one")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise _misfit(
            entry,
            f"entry {index} has shape {tuple(new.shape)} and {new.dtype}, the gradient has "
            f"{tuple(old.shape)} and {old.dtype}",
        )
    return new


def _misfit(entry: HookAtSite, what: str) -> HookReturnError:
    attachment = entry.attachment
    return HookReturnError(f"{attachment.kind.value} hook {attachment.name!r} on {entry.name!r}: {what}.")


def behind(tensor: Tensor) -> tuple[Tensor, torch.Size | None]:
    """Return where to tap a tensor so that an in-place operation on it does no harm: the tensor it is a reshape of.

    With it comes the shape of the reshape; a tensor that shows nothing else, or not all of it in order, is itself.
    """
    base = tensor._base
    if (
        base is None
        or base.grad_fn is None
        or tensor.numel() != base.numel()
        or not tensor.is_contiguous()
        or not base.is_contiguous()
    ):
        return tensor, None
    return base, tensor.shape


def accumulator(leaf: Tensor) -> Any:
    """Return the node that accumulates into a leaf; None for kinds of tensor that cannot be asked (sparse, nested).

    Inside a transform of ``torch.func`` a parameter that the transform was not told of has none either.
    """
    if leaf.layout is not torch.strided or leaf.is_nested:
        return None
    # What get_gradient_edge does, at a third of its price: the calls that ask have gradients enabled.
    node: Any = leaf.view_as(leaf).grad_fn
    return None if node is None else node.next_functions[0][0]


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
        """Return the view's part of a gradient of the tensor behind it."""
        return self._laid_out(grad).as_strided(*self._view)

    def add(self, grad: Tensor, more: Tensor) -> Tensor:
        """Return that gradient with ``more`` added to the view's part of it."""
        whole = self._laid_out(grad)
        whole.as_strided(*self._view).add_(more)
        return whole

    def _laid_out(self, grad: Tensor) -> Tensor:
        """Return a copy in memory as the tensor itself is, whose offsets then hold."""
        size, stride = self._behind
        return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
